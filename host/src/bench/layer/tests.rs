use std::sync::Arc;

use asym_gemm_cpu::pool::SpinPool;

use super::*;

fn tiny() -> Plan {
    Plan {
        shapes: vec![LayerShape {
            experts: 10,
            hidden: 96,
            intermediate: 130,
            top_k: 4,
        }],
        formats: vec![
            WeightFormat::Bf16,
            WeightFormat::Int8PerRow,
            WeightFormat::Int8Block128,
            WeightFormat::Fp8Block128,
        ],
        tokens: vec![1, 5, 70],
        case_time: Duration::from_millis(2),
        calls: 2..20,
        ..Plan::full()
    }
}

fn setup() -> Setup {
    let workers = SpinPool::new(2).expect("threads can be started");
    let engine = Engine::detect().expect("nothing is forced");
    Setup {
        engine: engine.with_workers(Arc::new(workers)),
        #[cfg(feature = "cuda")]
        gpus: Vec::new(),
    }
}

#[test]
fn without_a_gpu_every_case_of_the_cpu_is_right_and_has_a_time() {
    let plan = tiny();
    let mut told = Vec::new();
    let report = run(&plan, &setup(), &mut |p| told.push(p.clone())).expect("there is memory");
    assert!(report.wrong.is_empty(), "{:?}", report.wrong);
    assert!(report.skipped.is_empty(), "{:?}", report.skipped);
    assert_eq!(report.rows.len(), 4 * 3);
    for row in &report.rows {
        assert_eq!(row.policy, PolicyKind::CpuOnly);
        assert!((2..=20).contains(&row.calls), "{row:?}");
        assert!(row.best_ms > 0.0 && row.best_ms <= row.median_ms, "{row:?}");
        assert!(row.floor_ms > 0.0 && row.cpu_mb > 0.0 && row.link_mb == 0.0);
    }
    assert!(told.iter().all(|p| p.total == 12 && p.done <= 12));
    assert_eq!(report.limits.len(), 4);
    for line in report.csv().lines() {
        assert_eq!(line.split(',').count(), CSV_COLUMNS.split(',').count());
    }
    for row in report.table_rows() {
        assert_eq!(row.len(), Report::TABLE_HEADERS.len());
    }
    assert!(report.heading().contains("no GPU"));
    let folder = tempfile::tempdir().unwrap();
    let files = plot(&report, folder.path()).unwrap();
    assert_eq!(files.len(), 4);
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(
            text.contains("byte floor") && text.contains("cpu-only"),
            "{file:?}"
        );
    }
}

#[test]
fn policies_are_compared_at_the_same_case_only() {
    let plan = Plan {
        formats: vec![WeightFormat::Int8PerRow],
        tokens: vec![3],
        ..tiny()
    };
    let mut report = run(&plan, &setup(), &mut |_| ()).unwrap();
    let cpu = report.rows[0].clone();
    report.rows.push(Row {
        policy: PolicyKind::Adaptive,
        median_ms: cpu.median_ms * 0.5,
        ..cpu.clone()
    });
    report.rows.push(Row {
        tokens: 4,
        median_ms: cpu.median_ms * 0.1,
        ..cpu
    });
    assert!(report.remarks().contains("adaptive takes 0.50 of cpu-only"));
}

#[test]
fn a_wrong_output_has_no_time() {
    let plan = Plan {
        formats: vec![WeightFormat::Int8PerRow],
        ..tiny()
    };
    let block = Block::new(plan.shapes[0], plan.formats[0], &plan, &setup()).unwrap();
    let mut tokens = Tokens::new(&block, 5, 0.0, &setup()).unwrap();
    tokens.poison().unwrap();
    assert!(tokens.verify(&block, 0).unwrap_err().contains("NaN"));
    tokens.call(&block.layer, 0).unwrap();
    tokens.verify(&block, 0).unwrap();
    // The output is of another routing.
    assert!(tokens.verify(&block, 1).unwrap_err().contains("off"));
}
