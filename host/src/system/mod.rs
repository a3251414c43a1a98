//! What the machine and the operating system offer this process: the processor's
//! features, threads, memory and limits. Read-only facts for planning and for reports;
//! nothing here fails on a system that hides them, it says less.

mod bandwidth;
mod cpu;
mod memory;

pub use asym_gemm_cpu::topology::{NumaNode, NumaNodes, Threads};
pub use bandwidth::dram_read_rate;
pub use cpu::{AmxPermission, CpuInfo, amx_permission, request_amx};
pub(crate) use memory::zeroed;
pub use memory::{LockLimit, Memory, MemoryShort};

/// Everything above in one report.
#[derive(Clone, Debug, serde::Serialize)]
pub struct System {
    /// The processor.
    pub cpu: CpuInfo,
    /// Threads this process should use.
    pub threads: Threads,
    /// Main memory.
    pub memory: Memory,
    /// NUMA nodes.
    pub numa: NumaNodes,
    /// Limit on locked memory.
    pub lock_limit: LockLimit,
}

impl System {
    /// Reads it all; takes well under a millisecond on most machines.
    pub fn read() -> Self {
        Self {
            cpu: CpuInfo::read(),
            threads: Threads::read(),
            memory: Memory::read(),
            numa: NumaNodes::read(),
            lock_limit: LockLimit::read(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_this_machine_is_consistent_and_serialises() {
        let system = System::read();
        assert!(system.threads.default_count() >= 1);
        assert!(system.threads.default_count() <= system.threads.affinity.len().max(1));
        let json = serde_json::to_value(&system).expect("plain data");
        assert!(json["cpu"]["model"].is_string());
        assert!(json["threads"]["default"].as_u64().is_some_and(|n| n >= 1));
        if cfg!(target_os = "linux") {
            let total = system.memory.total_bytes.expect("/proc/meminfo is there");
            assert!(system.memory.available_bytes.expect("since 3.14") <= total);
        }
    }
}
