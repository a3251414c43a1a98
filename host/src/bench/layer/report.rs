//! What came out.

use super::Limits;
use crate::bench::Machine;
use crate::bench::cpu::Skipped;
use crate::moe::division::PolicyKind;

/// Columns of [`Report::csv`]. Bytes are of the mean call, in 10^6.
pub const CSV_COLUMNS: &str = "commit,cpu,threads,isa,gpu,experts,hidden,intermediate,top_k,format,\
    tokens,policy,calls,median_ms,best_ms,floor_ms,of_floor,cpu_ms,cpu_mb,link_mb,hbm_mb,dram_gb_s,\
    link_gb_s,together_gb_s";

/// One policy at one number of tokens.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Row {
    /// Experts.
    pub experts: usize,
    /// Model width.
    pub hidden: usize,
    /// Expert width.
    pub intermediate: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Format of the weights.
    pub format: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// The policy.
    pub policy: PolicyKind,
    /// Timed calls.
    pub calls: usize,
    /// Median of a call, input and output included.
    pub median_ms: f64,
    /// The fastest call.
    pub best_ms: f64,
    /// What its bytes of host memory take at least.
    pub floor_ms: f64,
    /// The CPU's part of the median call.
    pub cpu_ms: f64,
    /// Weights that the CPU read.
    pub cpu_mb: f64,
    /// Weights that crossed links.
    pub link_mb: f64,
    /// Weights that GPUs found in HBM.
    pub hbm_mb: f64,
    /// The limits measured on this bank.
    #[serde(skip)]
    pub limits: Limits,
}

impl Row {
    /// The time against the floor; 0 where nothing was in host memory.
    pub fn of_floor(&self) -> f64 {
        match self.floor_ms > 0.0 {
            true => self.median_ms / self.floor_ms,
            false => 0.0,
        }
    }

    /// Shape and format, as files are named.
    pub fn slug(&self) -> String {
        format!(
            "layer-{}x{}x{}-{}",
            self.experts, self.hidden, self.intermediate, self.format
        )
    }

    /// The same for people.
    pub fn name(&self) -> String {
        format!(
            "E={} H={} I={} top {} {}",
            self.experts, self.hidden, self.intermediate, self.top_k, self.format
        )
    }
}

/// All cases of a run.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    /// Where and from what.
    pub machine: Machine,
    /// The instruction set in use.
    pub isa: &'static str,
    /// The GPUs.
    pub gpu: String,
    /// Limits, of each bank in turn.
    pub limits: Vec<Limits>,
    /// Cases that were right.
    pub rows: Vec<Row>,
    /// Banks for which there was no memory or no kernels.
    pub skipped: Vec<Skipped>,
    /// Cases whose results were wrong.
    pub wrong: Vec<Skipped>,
    /// How long it took.
    pub seconds: f64,
}

impl Report {
    pub(super) fn new(machine: Machine, isa: &'static str, gpu: String) -> Self {
        Self {
            machine,
            isa,
            gpu,
            limits: Vec::new(),
            rows: Vec::new(),
            skipped: Vec::new(),
            wrong: Vec::new(),
            seconds: 0.0,
        }
    }

    pub(super) fn skip(&mut self, case: &str, reason: String) {
        let case = case.to_owned();
        self.skipped.push(Skipped { case, reason });
    }

    pub(super) fn wrong(&mut self, case: &str, reason: String) {
        let case = case.to_owned();
        self.wrong.push(Skipped { case, reason });
    }

    /// The rows with [`CSV_COLUMNS`] above them.
    pub fn csv(&self) -> String {
        let mut text = format!("{CSV_COLUMNS}\n");
        // The only texts that are not ours.
        let [commit, cpu, gpu] = [&self.machine.commit, &self.machine.cpu, &self.gpu]
            .map(|text| text.replace([',', '"', '\n'], " "));
        for row in &self.rows {
            let limits = &row.limits;
            text.push_str(&format!(
                "{commit},{cpu},{},{},{gpu},{},{},{},{},{},{},{},{},{:.4},{:.4},{:.4},{:.3},{:.4},\
                 {:.2},{:.2},{:.2},{:.2},{:.2},{:.2}\n",
                self.machine.threads,
                self.isa,
                row.experts,
                row.hidden,
                row.intermediate,
                row.top_k,
                row.format,
                row.tokens,
                row.policy,
                row.calls,
                row.median_ms,
                row.best_ms,
                row.floor_ms,
                row.of_floor(),
                row.cpu_ms,
                row.cpu_mb,
                row.link_mb,
                row.hbm_mb,
                limits.dram_gb_s,
                limits.link_gb_s,
                limits.together_cpu_gb_s + limits.together_link_gb_s,
            ));
        }
        text
    }

    /// Headers of [`Report::table_rows`]; the first two are text, the others are numbers.
    pub const TABLE_HEADERS: [&'static str; 11] = [
        "layer", "policy", "T", "ms", "best", "floor", "of floor", "CPU ms", "CPU MB", "link MB",
        "HBM MB",
    ];

    /// The rows for people.
    pub fn table_rows(&self) -> Vec<Vec<String>> {
        let row = |row: &Row| {
            vec![
                row.name(),
                row.policy.to_string(),
                row.tokens.to_string(),
                format!("{:.3}", row.median_ms),
                format!("{:.3}", row.best_ms),
                format!("{:.3}", row.floor_ms),
                format!("{:.2}x", row.of_floor()),
                format!("{:.3}", row.cpu_ms),
                format!("{:.1}", row.cpu_mb),
                format!("{:.1}", row.link_mb),
                format!("{:.1}", row.hbm_mb),
            ]
        };
        self.rows.iter().map(row).collect()
    }

    /// Lines above the table: the machine and its limits.
    pub fn heading(&self) -> String {
        let mut text = format!(
            "{}, {} threads, {}; {}; commit {}",
            self.machine.cpu, self.machine.threads, self.isa, self.gpu, self.machine.commit
        );
        for limits in &self.limits {
            text.push_str(&format!("\nCPU reads {:.1} GB/s", limits.dram_gb_s));
            if limits.link_gb_s > 0.0 {
                text.push_str(&format!(
                    ", link {:.1}, both at once {:.1} + {:.1}, HBM {:.0}",
                    limits.link_gb_s,
                    limits.together_cpu_gb_s,
                    limits.together_link_gb_s,
                    limits.hbm_gb_s
                ));
            }
        }
        text
    }

    /// Lines below it: what the adaptive policy gains, and what is missing.
    pub fn remarks(&self) -> String {
        let mut text = String::new();
        for adaptive in self
            .rows
            .iter()
            .filter(|r| r.policy == PolicyKind::Adaptive)
        {
            let others = self.rows.iter().filter(|r| {
                r.slug() == adaptive.slug()
                    && r.tokens == adaptive.tokens
                    && r.policy != PolicyKind::Adaptive
            });
            if let Some(best) = others.min_by(|a, b| a.median_ms.total_cmp(&b.median_ms)) {
                text.push_str(&format!(
                    "{} T={}: adaptive takes {:.2} of {}\n",
                    adaptive.name(),
                    adaptive.tokens,
                    adaptive.median_ms / best.median_ms,
                    best.policy
                ));
            }
        }
        let line = |what: &str, case: &Skipped| format!("{what}: {}: {}\n", case.case, case.reason);
        text.extend(self.wrong.iter().map(|case| line("WRONG", case)));
        text.extend(self.skipped.iter().map(|case| line("skipped", case)));
        text.push_str(&format!(
            "{} cases in {:.1} s\n",
            self.rows.len(),
            self.seconds
        ));
        text
    }
}
