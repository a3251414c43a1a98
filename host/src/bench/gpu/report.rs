//! What came out.

use super::Case;
use crate::bench::Machine;
use crate::bench::cpu::Skipped;
use crate::transfer::{LinkRates, Transfer};

/// Columns of [`Report::csv`]. `m` is rows of each expert.
pub const CSV_COLUMNS: &str = "commit,gpu,experts,n,k,format,m,transfer,ms,weight_gb_s,\
    limit_gb_s,share,tflops,kernel";

/// One case, timed.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Row {
    /// What was run.
    #[serde(flatten)]
    pub case: Case,
    /// Symbol of the kernel.
    pub kernel: &'static str,
    /// Median of a call, in milliseconds.
    pub ms: f64,
    /// Weights in 10^9 bytes a second, each weight counted once a call.
    pub weight_gb_s: f64,
    /// The rate of the way by which the weights come: copy engine, SM reads or HBM.
    pub limit_gb_s: f64,
    /// 10^12 operations a second, two for each multiply-add.
    pub tflops: f64,
}

impl Row {
    /// A case whose median call took `ms`.
    pub(super) fn new(case: Case, kernel: &'static str, ms: f64, link: &LinkRates) -> Self {
        Self {
            case,
            kernel,
            ms,
            weight_gb_s: case.weight_bytes() as f64 / ms * 1e-6,
            limit_gb_s: match case.transfer {
                Transfer::Direct => link.sm_read,
                Transfer::Resident => link.hbm_read,
                Transfer::Auto | Transfer::Staged => link.copy_engine,
            },
            tflops: case.ops() / ms * 1e-9,
        }
    }

    /// Weight rate against the limit; small where operations take longer than weights.
    pub fn share(&self) -> f64 {
        self.weight_gb_s / self.limit_gb_s
    }
}

/// All cases of a run.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    /// Where and from what.
    pub machine: Machine,
    /// The GPU's name.
    pub gpu: String,
    /// What link and memory can do, measured first.
    pub link: LinkRates,
    /// Cases that were right, in the plan's order.
    pub rows: Vec<Row>,
    /// Cases for which there was no memory.
    pub skipped: Vec<Skipped>,
    /// Cases whose results were wrong.
    pub wrong: Vec<Skipped>,
    /// How long it took.
    pub seconds: f64,
}

impl Report {
    /// The rows with [`CSV_COLUMNS`] above them.
    pub fn csv(&self) -> String {
        let mut text = format!("{CSV_COLUMNS}\n");
        // The only texts that are not ours.
        let [commit, gpu] =
            [&self.machine.commit, &self.gpu].map(|text| text.replace([',', '"', '\n'], " "));
        for row in &self.rows {
            let Case {
                experts,
                n,
                k,
                format,
                m,
                transfer,
            } = row.case;
            text.push_str(&format!(
                "{commit},{gpu},{experts},{n},{k},{format},{m},{transfer},{:.4},{:.2},{:.2},{:.4},{:.1},{}\n",
                row.ms, row.weight_gb_s, row.limit_gb_s, row.share(), row.tflops, row.kernel
            ));
        }
        text
    }

    /// Headers of [`Report::table_rows`]; the first two are text, the others are numbers.
    pub const TABLE_HEADERS: [&'static str; 6] =
        ["case", "kernel", "ms", "GB/s", "of limit", "TFLOP/s"];

    /// The rows for people.
    pub fn table_rows(&self) -> Vec<Vec<String>> {
        let row = |row: &Row| {
            vec![
                row.case.to_string(),
                row.kernel.to_owned(),
                format!("{:.4}", row.ms),
                format!("{:.1}", row.weight_gb_s),
                format!("{:.1} %", row.share() * 100.0),
                format!("{:.0}", row.tflops),
            ]
        };
        self.rows.iter().map(row).collect()
    }

    /// The line above the table: GPU and limits.
    pub fn heading(&self) -> String {
        format!(
            "{}, commit {}\ncopy engine {:.1} GB/s, SM reads {:.1}, HBM {:.0}; D in bf16, ms are medians",
            self.gpu,
            self.machine.commit,
            self.link.copy_engine,
            self.link.sm_read,
            self.link.hbm_read
        )
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::MatrixFormat;

    #[test]
    fn rates_follow_from_the_time_and_the_csv_has_every_column() {
        let link = LinkRates {
            copy_engine: 50.0,
            sm_read: 40.0,
            hbm_read: 4000.0,
        };
        let case = Case {
            experts: 10,
            n: 1000,
            k: 500,
            format: MatrixFormat::Bf16,
            m: 3,
            transfer: Transfer::Staged,
        };
        let row = Row::new(case, "kernel", 0.4, &link);
        assert_eq!((row.weight_gb_s, row.share()), (25.0, 0.5));
        assert!((row.tflops - 0.075).abs() < 1e-12);
        let direct = Case {
            transfer: Transfer::Direct,
            ..case
        };
        assert_eq!(Row::new(direct, "kernel", 0.4, &link).limit_gb_s, 40.0);
        let report = Report {
            machine: Machine::read(1),
            gpu: "a \"GPU\", or two".into(),
            link,
            rows: vec![row],
            skipped: vec![],
            wrong: vec![],
            seconds: 0.0,
        };
        for line in report.csv().lines() {
            assert_eq!(line.split(',').count(), CSV_COLUMNS.split(',').count());
        }
        assert_eq!(report.table_rows()[0].len(), Report::TABLE_HEADERS.len());
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["rows"][0]["format"], "bf16");
        assert_eq!(json["rows"][0]["m"], 3);
    }
}
