//! How tables and figures are written.

use std::fmt::Write;

/// Appends a table in Markdown; the first row is the header.
pub(super) fn markdown(out: &mut String, rows: &[Vec<String>]) {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| {
        let lengths = rows.iter().map(|row| row[column].chars().count());
        lengths.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for (at, row) in rows.iter().enumerate() {
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(out, "| {cell:width$} ");
        }
        out.push_str("|\n");
        if at == 0 {
            for width in &widths {
                let _ = write!(out, "|{:-<1$}", "", width + 2);
            }
            out.push_str("|\n");
        }
    }
}

/// Three significant digits.
pub(super) fn number(value: f64) -> String {
    let magnitude = value.abs();
    let decimals = match magnitude {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        0.0 => 0,
        _ => 3,
    };
    format!("{value:.decimals$}")
}
