//! A table with a column for each size, in the form of another document.

use std::fmt::Write;

use serde_json::{Value, json};

use super::text::{markdown, number};

/// See the [module](self).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Grid {
    pub(crate) title: &'static str,
    /// What the figures are.
    pub(crate) note: &'static str,
    pub(crate) columns: Vec<&'static str>,
    pub(crate) lines: Vec<Line>,
}

/// A figure, or several, for each column.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Line {
    pub(crate) way: String,
    pub(crate) figure: &'static str,
    /// Empty where there is no figure.
    pub(crate) cells: Vec<Vec<f64>>,
}

impl Grid {
    /// Appends the table in Markdown.
    pub(super) fn text(&self, out: &mut String) {
        let header = ["way", "figure"].into_iter().chain(self.columns.clone());
        let mut cells = vec![header.map(str::to_owned).collect::<Vec<_>>()];
        let mut way = "";
        for line in &self.lines {
            let shown = if line.way == way { "" } else { &line.way };
            way = &line.way;
            let figures = line.cells.iter().map(|figures| match figures[..] {
                [] => "-".to_owned(),
                _ => {
                    let figures: Vec<_> = figures.iter().copied().map(number).collect();
                    figures.join(" / ")
                }
            });
            let names = [shown.to_owned(), line.figure.to_owned()];
            cells.push(names.into_iter().chain(figures).collect());
        }
        let _ = writeln!(out, "\n### {}\n\n{}\n", self.title, self.note);
        markdown(out, &cells);
    }

    pub(super) fn json(&self) -> Value {
        let lines = self.lines.iter().map(|line| {
            json!({
                "way": line.way,
                "figure": line.figure,
                "cells": line.cells,
            })
        });
        json!({
            "title": self.title,
            "note": self.note,
            "columns": self.columns,
            "lines": lines.collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_names_each_way_once_and_marks_what_has_no_figure() {
        let line = |way: &str, figure, cells: &[&[f64]]| Line {
            way: way.to_owned(),
            figure,
            cells: cells.iter().map(|cell| cell.to_vec()).collect(),
        };
        let grid = Grid {
            title: "to guest",
            note: "A: time.",
            columns: vec!["4 KiB", "16 KiB"],
            lines: vec![
                line("copy", "A / B", &[&[1.5, 5.3], &[]]),
                line("copy", "D", &[&[17145.0], &[2.0]]),
            ],
        };
        let mut out = String::new();
        grid.text(&mut out);
        let rows: Vec<Vec<_>> = out
            .lines()
            .filter(|line| line.starts_with('|'))
            .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
            .collect();
        assert_eq!(rows[0], ["way", "figure", "4 KiB", "16 KiB"]);
        assert_eq!(rows[2], ["copy", "A / B", "1.50 / 5.30", "-"]);
        assert_eq!(rows[3], ["", "D", "17145", "2.00"]);
        let json = grid.json();
        assert_eq!(json["lines"][0]["cells"], json!([[1.5, 5.3], []]));
        assert_eq!(json["columns"][1], "16 KiB");
    }
}
