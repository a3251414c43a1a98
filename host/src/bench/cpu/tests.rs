use std::sync::Arc;

use asym_gemm_cpu::pool::SpinPool;
use asym_gemm_formats::WeightFormat;

use super::*;

const FORMATS: [WeightFormat; 4] = [
    WeightFormat::Bf16,
    WeightFormat::Int8PerRow,
    WeightFormat::Int8Block128,
    WeightFormat::Fp8Block128,
];

/// Small and odd shapes in every format, in little time.
fn tiny() -> Plan {
    let gemm = Shape::Gemm(GemmShape {
        experts: 3,
        n: 37,
        k: 200,
    });
    let layer = Shape::Layer(LayerShape {
        experts: 10,
        hidden: 96,
        intermediate: 130,
        top_k: 4,
    });
    let block = |shape, format| Block {
        shape,
        format,
        sizes: vec![1, 5, 17],
    };
    let gemms = FORMATS[..3].iter().map(|&format| block(gemm, format));
    let layers = FORMATS.iter().map(|&format| block(layer, format));
    Plan {
        blocks: gemms.chain(layers).collect(),
        weight_bytes: 4 << 20,
        case_time: Duration::from_millis(2),
        calls: 2..20,
        read_rounds: 1,
        product_time: Duration::from_millis(1),
        limit: None,
    }
}

fn engine() -> Engine {
    let workers = SpinPool::new(2).expect("threads can be started");
    let engine = Engine::detect().expect("nothing is forced");
    engine.with_workers(Arc::new(workers))
}

fn run_quietly(plan: &Plan) -> Report {
    run(plan, &engine(), &mut |_| ()).expect("there is memory")
}

#[test]
fn every_case_is_right_and_has_rates() {
    let plan = tiny();
    let mut told = Vec::new();
    let report = run(&plan, &engine(), &mut |progress| {
        told.push(progress.clone())
    })
    .expect("there is memory");
    assert!(report.wrong.is_empty(), "{:?}", report.wrong);
    assert!(report.skipped.is_empty(), "{:?}", report.skipped);
    assert_eq!(report.rows.len(), plan.sizes());
    for row in &report.rows {
        assert!((2..=20).contains(&row.calls), "{row:?}");
        assert!(row.best_ms > 0.0 && row.best_ms <= row.median_ms, "{row:?}");
        assert!(row.weight_gb_s > 0.0 && row.tera_ops > 0.0, "{row:?}");
        assert!(
            row.share() >= row.share_of_dram() && row.share() > 0.0,
            "{row:?}"
        );
    }
    assert_eq!(
        told.last().map(|progress| progress.done),
        Some(plan.sizes() - 1)
    );
    assert!(told.iter().all(|progress| progress.total == plan.sizes()));
}

#[test]
fn a_wrong_result_is_noticed_in_every_format() {
    for block in &tiny().blocks {
        let engine = engine();
        let workers = engine.workers().as_ref();
        let mut weights = vec![0; 4 << 20];
        let mut workload = data::workload(block, workers, &mut weights).expect("it fits");
        for call in [0, 1] {
            workload.call(&engine, 5, call).expect("valid");
            assert_eq!(workload.verify(5, call), Ok(()), "{block}");
        }
        // The outcome of another size, or of other weights, is not that of this one.
        workload.call(&engine, 5, 0).expect("valid");
        workload.call(&engine, 3, 0).expect("valid");
        assert!(workload.verify(5, 0).is_err(), "{block}");
    }
}

#[test]
fn the_csv_has_a_field_for_every_column() {
    let report = run_quietly(&tiny());
    let csv = report.csv();
    let columns = CSV_COLUMNS.split(',').count();
    assert_eq!(csv.lines().count(), 1 + report.rows.len());
    assert!(
        csv.lines().all(|line| line.split(',').count() == columns),
        "{csv}"
    );
    assert!(CSV_COLUMNS.split(',').all(|column| !column.contains(' ')));
    assert_eq!(report.table_rows()[0].len(), Report::TABLE_HEADERS.len());
}

#[test]
fn what_has_no_time_or_memory_is_named() {
    let mut plan = tiny();
    plan.limit = Some(Duration::ZERO);
    let report = run_quietly(&plan);
    assert_eq!(report.skipped.len(), plan.sizes());
    assert!(report.remarks().contains("no time left"));

    let weights = 1 << 20;
    let mut block = plan.blocks.remove(0);
    assert_eq!(room(&block, weights), Ok(()));
    assert!(
        room(&block, 100)
            .expect_err("too small")
            .contains("room for 100")
    );
    block.sizes = vec![1 << 40];
    assert!(
        room(&block, weights)
            .expect_err("too many")
            .contains("activations")
    );
}

#[test]
fn each_shape_has_a_plot() {
    let report = run_quietly(&tiny());
    let folder = tempfile::tempdir().expect("a temporary folder");
    let files = plot(&report, &folder.path().join("new")).expect("writable");
    let names: Vec<_> = files.iter().filter_map(|file| file.file_name()).collect();
    assert_eq!(names, ["gemm-3x37x200.svg", "layer-10x96x130.svg"]);
    for file in files {
        let text = std::fs::read_to_string(file).expect("written");
        assert!(
            text.contains("<svg") && text.contains("<polyline"),
            "{text}"
        );
        let formats = if text.contains("GEMM") {
            &FORMATS[..3]
        } else {
            &FORMATS
        };
        for format in formats {
            assert!(text.contains(format.name()), "{format} is missing");
        }
    }
    let taken = folder.path().join("file");
    std::fs::write(&taken, "").expect("writable");
    assert!(plot(&report, &taken).is_err());
}
