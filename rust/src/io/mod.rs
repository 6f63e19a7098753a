//! Bytes at offsets: extents, aligned buffers, direct reads, read queues.

pub mod buffer;
pub mod extent;
pub mod file;
pub mod file_hash;
pub mod output_file;
pub mod queue;
pub mod replacement;
pub mod sim_queue;
pub mod thread_queue;
pub mod threads;
