//! Tables on standard output.

use comfy_table::{Cell, CellAlignment, Table, presets};

/// A table with `headers`; columns after the first `text_columns` are right-aligned numbers.
pub(super) fn table(headers: &[&str], text_columns: usize, rows: &[Vec<String>]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(headers);
    for row in rows {
        table.add_row(row.iter().enumerate().map(|(i, text)| {
            let cell = Cell::new(text);
            if i < text_columns {
                cell
            } else {
                cell.set_alignment(CellAlignment::Right)
            }
        }));
    }
    table
}
