//! Plots of the time against the tokens, with the floor.

use std::path::{Path, PathBuf};

use plotters::prelude::*;

use super::report::{Report, Row};
use crate::bench::cpu::PlotError;
use crate::moe::division::PolicyKind;

const SIZE: (u32, u32) = (860, 480);
const FONT: &str = "sans-serif";
// plotters draws letters at 0.8 of these.
const TITLE: u32 = 17;
const LABEL: u32 = 16;

/// Draws one SVG file for each shape and format into `folder`, which is made if it is missing: a
/// line for each policy and one for the floor, both axes logarithmic. Returns the files.
///
/// # Errors
/// [`PlotError`] where a file cannot be written.
pub fn plot(report: &Report, folder: &Path) -> Result<Vec<PathBuf>, PlotError> {
    std::fs::create_dir_all(folder).map_err(|error| PlotError {
        path: folder.to_owned(),
        reason: error.to_string(),
    })?;
    let mut slugs: Vec<String> = Vec::new();
    for row in &report.rows {
        if !slugs.contains(&row.slug()) {
            slugs.push(row.slug());
        }
    }
    let mut files = Vec::new();
    for slug in slugs {
        let path = folder.join(format!("{slug}.svg"));
        let rows: Vec<&Row> = report.rows.iter().filter(|r| r.slug() == slug).collect();
        draw(report, &rows, &path).map_err(|error| PlotError {
            path: path.clone(),
            reason: error.to_string(),
        })?;
        files.push(path);
    }
    Ok(files)
}

fn draw(report: &Report, rows: &[&Row], path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let Some(first) = rows.first() else {
        return Ok(());
    };
    let mut policies: Vec<PolicyKind> = Vec::new();
    for row in rows {
        if !policies.contains(&row.policy) {
            policies.push(row.policy);
        }
    }
    let times = || rows.iter().flat_map(|row| [row.median_ms, row.floor_ms]);
    let positive = || times().filter(|ms| *ms > 0.0);
    let lowest = positive().fold(f64::INFINITY, f64::min).min(1e6);
    let highest = positive().fold(lowest, f64::max);
    let most = rows.iter().map(|row| row.tokens).max().unwrap_or(1);

    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let title = format!(
        "{}: {}, {} threads; {}; {}",
        first.name(),
        report.machine.cpu,
        report.machine.threads,
        report.gpu,
        report.machine.commit
    );
    let mut chart = ChartBuilder::on(&area)
        .caption(title, (FONT, TITLE))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (1f64..(most as f64).max(2.0)).log_scale().base(2.0),
            (lowest * 0.8..highest * 1.25).log_scale(),
        )?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("tokens")
        .y_desc("ms")
        .x_label_formatter(&|tokens| format!("{tokens:.0}"))
        .y_label_formatter(&|ms| format!("{ms}"))
        .label_style((FONT, LABEL))
        .draw()?;
    // Where a policy leaves bytes in HBM its own floor is lower; the highest is that of all bytes.
    let mut floor: Vec<(f64, f64)> = Vec::new();
    for row in rows.iter().filter(|row| row.floor_ms > 0.0) {
        let tokens = row.tokens as f64;
        match floor.iter_mut().find(|(t, _)| *t == tokens) {
            Some((_, ms)) => *ms = ms.max(row.floor_ms),
            None => floor.push((tokens, row.floor_ms)),
        }
    }
    let dashes = BLACK.mix(0.6).stroke_width(2);
    chart
        .draw_series(DashedLineSeries::new(floor, 6, 4, dashes))?
        .label("byte floor")
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], dashes));
    for (index, policy) in policies.into_iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let points: Vec<(f64, f64)> = rows
            .iter()
            .filter(|row| row.policy == policy && row.median_ms > 0.0)
            .map(|row| (row.tokens as f64, row.median_ms))
            .collect();
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)).point_size(3))?
            .label(policy.to_string())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .label_font((FONT, LABEL))
        .draw()?;
    area.present()?;
    Ok(())
}
