//! Medians, spans and ratios, as text and as JSON.

use std::fmt::Write;

use crate::run::Figures;

/// Median, smallest and largest of some measurements.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Span {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Span {
    fn of(values: impl Iterator<Item = f64>) -> Span {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = match values.len() {
            0 => f64::NAN,
            odd if odd % 2 == 1 => values[middle],
            _ => (values[middle - 1] + values[middle]) / 2.0,
        };
        Span {
            median,
            min: values.first().copied().unwrap_or(f64::NAN),
            max: values.last().copied().unwrap_or(f64::NAN),
        }
    }
}

/// One device's figures in one case.
#[derive(Debug)]
pub(crate) struct Column {
    device: &'static str,
    mb_s: Span,
    cpu: Span,
    syscalls_per_mb: Option<(f64, &'static str)>,
}

impl Column {
    pub(crate) fn new(
        device: &'static str,
        figures: &[Figures],
        syscalls_per_mb: Option<(f64, &'static str)>,
    ) -> Column {
        Column {
            device,
            mb_s: Span::of(figures.iter().map(|one| one.mb_s)),
            cpu: Span::of(figures.iter().map(|one| one.cpu_s_per_gb)),
            syscalls_per_mb,
        }
    }
}

/// One case.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) case: String,
    pub(crate) columns: Vec<Column>,
}

impl Row {
    /// Ours by the peer's device CPU time.
    fn cpu_ratio(&self) -> Option<f64> {
        match &self.columns[..] {
            [ours, peer, ..] if ours.device == "zerosock" && peer.device != "bare socket" => {
                Some(ours.cpu.median / peer.cpu.median)
            }
            _ => None,
        }
    }
}

pub(crate) fn text(rows: &[Row], rounds: usize) -> String {
    let mut out = format!(
        "Device alone, our driver half as its guest; median (smallest to largest) of {rounds}.\n\n\
         | case | device | MB/s | device CPU s/GB | system calls/MB | CPU, ratio |\n\
         |---|---|---|---|---|---|\n"
    );
    for row in rows {
        for (at, column) in row.columns.iter().enumerate() {
            let syscalls = column
                .syscalls_per_mb
                .map_or("not counted".to_owned(), |(calls, how)| {
                    format!("{calls:.0} ({how})")
                });
            let ratio = match row.cpu_ratio() {
                Some(ratio) if at == 0 => format!("{ratio:.2}"),
                _ => String::new(),
            };
            // Writing to a String does not fail.
            let _ = writeln!(
                out,
                "| {} | {} | {:.0} ({:.0} to {:.0}) | {:.3} ({:.3} to {:.3}) | {syscalls} | {ratio} |",
                if at == 0 { row.case.as_str() } else { "" },
                column.device,
                column.mb_s.median,
                column.mb_s.min,
                column.mb_s.max,
                column.cpu.median,
                column.cpu.min,
                column.cpu.max,
            );
        }
    }
    out
}

pub(crate) fn json(rows: &[Row]) -> serde_json::Value {
    let span = |span: Span| serde_json::json!([span.median, span.min, span.max]);
    rows.iter()
        .map(|row| {
            let devices: Vec<_> = row
                .columns
                .iter()
                .map(|column| {
                    serde_json::json!({
                        "device": column.device,
                        "mb_s": span(column.mb_s),
                        "cpu_s_per_gb": span(column.cpu),
                        "syscalls_per_mb": column.syscalls_per_mb.map(|(calls, _)| calls),
                        "syscalls_counted_with": column.syscalls_per_mb.map(|(_, how)| how),
                    })
                })
                .collect();
            serde_json::json!({
                "case": row.case,
                "cpu_ratio": row.cpu_ratio(),
                "devices": devices,
            })
        })
        .collect()
}
