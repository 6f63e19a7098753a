//! What is resident and what streams.

pub mod access_trace;
pub mod counters;
pub mod eviction;
pub mod expert_cache;
pub mod host_memory;
pub mod memory_plan;
pub mod trace_replay;
pub mod trunk_stream;
