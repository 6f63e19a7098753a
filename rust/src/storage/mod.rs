//! What is resident and what streams.

pub mod eviction;
pub mod expert_cache;
pub mod host_memory;
pub mod memory_plan;
pub mod trunk_stream;
