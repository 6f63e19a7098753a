//! Bytes at offsets: extents, aligned buffers, direct reads, read queues.

pub mod extent;
