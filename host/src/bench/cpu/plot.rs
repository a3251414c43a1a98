//! Plots of the share of the ceiling against the size.

use std::path::{Path, PathBuf};

use asym_gemm_formats::WeightFormat;
use plotters::prelude::*;

use super::case::Shape;
use super::report::{Report, Row};

/// A file that could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct PlotError {
    /// The file or folder.
    pub path: PathBuf,
    /// What went wrong.
    pub reason: String,
}

const SIZE: (u32, u32) = (860, 480);
const FONT: &str = "sans-serif";
// plotters draws letters at 0.8 of these.
const TITLE: u32 = 19;
const LABEL: u32 = 16;

/// Draws one SVG file for each shape into `folder`, which is made if it is missing: a line for each
/// format, share of the nearer ceiling against rows or tokens. Returns the files.
///
/// # Errors
/// [`PlotError`] where a file cannot be written.
pub fn plot(report: &Report, folder: &Path) -> Result<Vec<PathBuf>, PlotError> {
    std::fs::create_dir_all(folder).map_err(|error| PlotError {
        path: folder.to_owned(),
        reason: error.to_string(),
    })?;
    let mut shapes: Vec<Shape> = Vec::new();
    for row in &report.rows {
        if !shapes.contains(&row.case.shape) {
            shapes.push(row.case.shape);
        }
    }
    let mut files = Vec::new();
    for shape in shapes {
        let path = folder.join(format!("{}.svg", shape.slug()));
        draw(report, shape, &path).map_err(|error| PlotError {
            path: path.clone(),
            reason: error.to_string(),
        })?;
        files.push(path);
    }
    Ok(files)
}

fn draw(report: &Report, shape: Shape, path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let rows: Vec<&Row> = report
        .rows
        .iter()
        .filter(|row| row.case.shape == shape)
        .collect();
    let mut formats: Vec<WeightFormat> = Vec::new();
    for row in &rows {
        if !formats.contains(&row.case.format) {
            formats.push(row.case.format);
        }
    }
    let largest = rows.iter().map(|row| row.case.size).max().unwrap_or(1);
    let highest = rows.iter().map(|row| row.share()).fold(1.0, f64::max);

    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let machine = &report.machine;
    let title = format!(
        "{shape}: {}, {} threads, {}, {}",
        machine.cpu, machine.threads, report.isa, machine.commit
    );
    let mut chart = ChartBuilder::on(&area)
        .caption(title, (FONT, TITLE))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(
            (1f64..(largest as f64).max(2.0)).log_scale().base(2.0),
            0f64..highest * 1.05,
        )?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(match shape {
            Shape::Gemm(_) => "rows of each expert",
            Shape::Layer(_) => "tokens",
        })
        .y_desc("share of the nearer ceiling")
        .x_label_formatter(&|size| format!("{size:.0}"))
        .y_label_formatter(&|share| format!("{:.0} %", share * 100.0))
        .label_style((FONT, LABEL))
        .draw()?;
    for (index, format) in formats.into_iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let points: Vec<(f64, f64)> = rows
            .iter()
            .filter(|row| row.case.format == format)
            .map(|row| (row.case.size as f64, row.share()))
            .collect();
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)).point_size(3))?
            .label(format.to_string())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .label_font((FONT, LABEL))
        .draw()?;
    area.present()?;
    Ok(())
}
