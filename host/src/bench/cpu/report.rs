//! What came out.

use asym_gemm_cpu::Engine;

use super::case::{Block, Case};
use super::ceilings::Ceilings;
use super::middle;
use crate::bench::Machine;

/// Columns of [`Report::csv`]. `a` and `b` are N and K of a GEMM, H and I of a layer; `size` is
/// rows of each expert or tokens.
pub const CSV_COLUMNS: &str = "commit,cpu,threads,isa,kernel,kind,format,experts,a,b,size,calls,\
    median_ms,best_ms,weight_gb_s,tera_ops,dram_gb_s,product,product_tera_ops,\
    share_of_dram,share_of_products,share";

/// One case, timed.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Row {
    /// What was run.
    #[serde(skip)]
    pub case: Case,
    /// The same in words.
    pub name: String,
    /// The kernel, as the engine names it.
    pub kernel: &'static str,
    /// Timed calls.
    pub calls: usize,
    /// Median of a call.
    pub median_ms: f64,
    /// The fastest call.
    pub best_ms: f64,
    /// Weights read in 10^9 bytes a second, each weight counted once a call.
    pub weight_gb_s: f64,
    /// 10^12 operations a second, two for each multiply-add.
    pub tera_ops: f64,
    /// Ceiling: reading main memory, in 10^9 bytes a second.
    pub dram_gb_s: f64,
    /// Ceiling: the instruction that multiplies.
    pub product: &'static str,
    /// Its rate on registers, in 10^12 operations a second.
    pub product_tera_ops: f64,
}

impl Row {
    /// `seconds` of each call; weights of `bytes` in the mean call.
    pub(super) fn new(
        case: Case,
        engine: &Engine,
        ceilings: &Ceilings,
        seconds: &[f64],
        bytes: f64,
    ) -> Self {
        let median = middle(seconds).max(1e-9);
        let product = ceilings.best_product();
        Self {
            case,
            name: case.to_string(),
            kernel: engine.kernel_name(case.format),
            calls: seconds.len(),
            median_ms: median * 1e3,
            best_ms: seconds.iter().copied().fold(median, f64::min) * 1e3,
            weight_gb_s: bytes / median * 1e-9,
            tera_ops: case.ops() / median * 1e-12,
            dram_gb_s: ceilings.dram.gb_per_second,
            product: product.map_or("", |product| product.name),
            product_tera_ops: product.map_or(0.0, |product| product.tera_ops),
        }
    }

    /// Weights read against the rate of main memory: the share that counts for few rows.
    pub fn share_of_dram(&self) -> f64 {
        ratio(self.weight_gb_s, self.dram_gb_s)
    }

    /// Operations against the rate on registers: the share that counts for many.
    pub fn share_of_products(&self) -> f64 {
        ratio(self.tera_ops, self.product_tera_ops)
    }

    /// The larger of both: the time that the nearer ceiling allows against the time taken.
    pub fn share(&self) -> f64 {
        self.share_of_dram().max(self.share_of_products())
    }
}

fn ratio(value: f64, of: f64) -> f64 {
    if of > 0.0 { value / of } else { 0.0 }
}

/// A case without a time, and why.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Skipped {
    /// The case in words.
    pub case: String,
    /// What is missing, or wrong.
    pub reason: String,
}

/// All cases of a run.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    /// Where and from what.
    pub machine: Machine,
    /// The instruction set in use.
    pub isa: &'static str,
    /// What the machine can do, measured first. Each block of rows has a measurement of its own.
    pub ceilings: Ceilings,
    /// Cases that were right, in the plan's order.
    pub rows: Vec<Row>,
    /// Cases for which there was no memory or time.
    pub skipped: Vec<Skipped>,
    /// Cases whose results were wrong.
    pub wrong: Vec<Skipped>,
    /// How long it took.
    pub seconds: f64,
}

impl Report {
    pub(super) fn new(machine: Machine, isa: &'static str, ceilings: Ceilings) -> Self {
        Self {
            machine,
            isa,
            ceilings,
            rows: Vec::new(),
            skipped: Vec::new(),
            wrong: Vec::new(),
            seconds: 0.0,
        }
    }

    pub(super) fn skip(&mut self, block: &Block, sizes: &[usize], reason: &str) {
        self.skipped.extend(sizes.iter().map(|&size| Skipped {
            case: block.case(size).to_string(),
            reason: reason.to_owned(),
        }));
    }

    pub(super) fn wrong(&mut self, case: Case, what: String) {
        self.wrong.push(Skipped {
            case: case.to_string(),
            reason: what,
        });
    }

    /// The rows with [`CSV_COLUMNS`] above them.
    pub fn csv(&self) -> String {
        let mut text = format!("{CSV_COLUMNS}\n");
        let Machine {
            cpu,
            threads,
            commit,
        } = &self.machine;
        // The only texts that are not ours.
        let [commit, cpu] = [commit, cpu].map(|text| text.replace([',', '"', '\n'], " "));
        for row in &self.rows {
            let [experts, a, b] = row.case.shape.dimensions();
            let fields = [
                commit.clone(),
                cpu.clone(),
                threads.to_string(),
                self.isa.to_owned(),
                row.kernel.to_owned(),
                row.case.shape.kind().to_owned(),
                row.case.format.to_string(),
                experts.to_string(),
                a.to_string(),
                b.to_string(),
                row.case.size.to_string(),
                row.calls.to_string(),
                format!("{:.4}", row.median_ms),
                format!("{:.4}", row.best_ms),
                format!("{:.2}", row.weight_gb_s),
                format!("{:.4}", row.tera_ops),
                format!("{:.2}", row.dram_gb_s),
                row.product.to_owned(),
                format!("{:.4}", row.product_tera_ops),
                format!("{:.3}", row.share_of_dram()),
                format!("{:.3}", row.share_of_products()),
                format!("{:.3}", row.share()),
            ];
            text.push_str(&fields.join(","));
            text.push('\n');
        }
        text
    }

    /// Headers of [`Report::table_rows`]; the first is text, the others are numbers.
    pub const TABLE_HEADERS: [&'static str; 8] = [
        "case",
        "ms",
        "best",
        "GB/s",
        "of DRAM",
        "TOP/s",
        "of products",
        "share",
    ];

    /// The rows for people.
    pub fn table_rows(&self) -> Vec<Vec<String>> {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        self.rows
            .iter()
            .map(|row| {
                vec![
                    row.name.clone(),
                    format!("{:.3}", row.median_ms),
                    format!("{:.3}", row.best_ms),
                    format!("{:.1}", row.weight_gb_s),
                    percent(row.share_of_dram()),
                    format!("{:.3}", row.tera_ops),
                    percent(row.share_of_products()),
                    percent(row.share()),
                ]
            })
            .collect()
    }

    /// Lines above the table: the machine and its ceilings.
    pub fn heading(&self) -> String {
        let Machine {
            cpu,
            threads,
            commit,
        } = &self.machine;
        let dram = self.ceilings.dram;
        let mut text = format!(
            "{cpu}, {threads} threads, {}, commit {commit}\nDRAM read {:.1} GB/s (best round {:.1})",
            self.isa, dram.gb_per_second, dram.best_gb_per_second
        );
        for product in &self.ceilings.products {
            text.push_str(&format!(", {} {:.3} TOP/s", product.name, product.tera_ops));
        }
        text
    }

    /// Lines below it: what is missing.
    pub fn remarks(&self) -> String {
        let line = |what: &str, case: &Skipped| format!("{what}: {}: {}\n", case.case, case.reason);
        let wrong = self.wrong.iter().map(|case| line("WRONG", case));
        let skipped = self.skipped.iter().map(|case| line("skipped", case));
        let seconds = format!("{} cases in {:.1} s\n", self.rows.len(), self.seconds);
        wrong.chain(skipped).chain([seconds]).collect()
    }
}
