//! Tables, as text and as JSON.
//!
//! # Invariants
//! - Every row names its peer; a row without a figure has the reason.
//! - A ratio above 1 always means that zerosock is better.

mod grid;
mod text;

use std::fmt::Write;

use serde::Serialize;
use serde_json::{Value, json};

use crate::rounds::{Spread, interval, ratio};
pub(crate) use grid::{Grid, Line};
use text::{markdown, number};

/// What a figure measures.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Metric {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) higher_is_better: bool,
}

impl Metric {
    /// Of which more is better.
    pub(crate) const fn higher(name: &'static str, unit: &'static str) -> Metric {
        Metric {
            name,
            unit,
            higher_is_better: true,
        }
    }

    /// Of which less is better.
    pub(crate) const fn lower(name: &'static str, unit: &'static str) -> Metric {
        Metric {
            higher_is_better: false,
            ..Metric::higher(name, unit)
        }
    }
}

/// The figures of zerosock and of one peer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) metric: Metric,
    /// Or why there is none.
    pub(crate) ours: Result<Spread, String>,
    pub(crate) peer_name: String,
    pub(crate) peer: Result<Spread, String>,
}

/// The names of a case's contestants, zerosock first, and their outcomes as
/// [`alternate`](crate::rounds::alternate) returns them.
#[derive(Clone, Debug)]
pub(crate) struct Outcomes<T>(pub(crate) Vec<(String, Result<Vec<T>, String>)>);

impl<T> Outcomes<T> {
    /// Adds a contestant that is not measured: a bound, or another figure of one of them.
    pub(crate) fn push(&mut self, title: impl ToString, outcome: Result<Vec<T>, String>) {
        self.0.push((title.to_string(), outcome));
    }

    /// Outcomes of another kind, made of each of these.
    pub(crate) fn map<U>(&self, of: impl Fn(&T) -> U) -> Outcomes<U> {
        let outcome = |outcome: &Result<Vec<T>, String>| {
            let rounds = outcome.as_ref().map_err(Clone::clone)?;
            Ok(rounds.iter().map(&of).collect())
        };
        let all = self.0.iter();
        Outcomes(
            all.map(|(title, of)| (title.clone(), outcome(of)))
                .collect(),
        )
    }

    /// The first outcome of a contestant.
    pub(crate) fn first(&self, contestant: usize) -> Option<&T> {
        self.0.get(contestant)?.1.as_ref().ok()?.first()
    }

    /// The figure of a contestant, of the values of its outcomes.
    ///
    /// # Errors
    /// Why it has none.
    pub(crate) fn figure(
        &self,
        contestant: usize,
        metric: Metric,
        value: impl Fn(&T) -> f64,
    ) -> Result<Spread, String> {
        let (_, outcomes) = self.0.get(contestant).ok_or("not measured")?;
        let values = outcomes.as_ref().map_err(Clone::clone)?.iter().map(value);
        let values: Vec<f64> = values.collect();
        if values.iter().any(|value| value.is_nan()) {
            return Err("nothing to count within the measured time".to_owned());
        }
        let spread = Spread::of(values, metric.higher_is_better);
        spread.ok_or_else(|| "no rounds".to_owned())
    }
}

/// One table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Table {
    pub(crate) name: String,
    /// The method, in one or two sentences.
    pub(crate) method: String,
    pub(crate) machine: String,
    /// The cores of the device, of its driver and of the program on the host, if they were chosen.
    pub(crate) placement: Option<String>,
    pub(crate) rounds: usize,
    /// With other releases.
    pub(crate) comparison: Option<Comparison>,
    pub(crate) rows: Vec<Row>,
    /// The figures, or further ones, in the form of another document.
    pub(crate) grids: Vec<Grid>,
    /// Contestants that could not run, and how to install them.
    pub(crate) missing: Vec<Missing>,
}

/// A comparison with other releases of zerosock.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Comparison {
    /// Their names among the peers.
    pub(crate) releases: Vec<&'static str>,
    /// Ratios below it are losses.
    pub(crate) loss: f64,
}

/// A row that is worse than that of another release.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loss<'t> {
    pub(crate) row: &'t Row,
    /// Whether the interval of the ratio, if there are enough rounds for one, is below 1.
    pub(crate) is_certain: bool,
}

/// A contestant that could not run, or failed.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub(crate) struct Missing {
    pub(crate) name: String,
    pub(crate) reason: String,
}

impl Row {
    pub(crate) fn ratio(&self) -> Option<f64> {
        match (&self.ours, &self.peer) {
            (Ok(ours), Ok(peer)) => ratio(ours.median, peer.median, self.metric.higher_is_better),
            _ => None,
        }
    }

    /// 95 % interval of the mean of the rounds' ratios; none of fewer than five rounds.
    pub(crate) fn interval(&self) -> Option<(f64, f64)> {
        let (Ok(ours), Ok(peer)) = (&self.ours, &self.peer) else {
            return None;
        };
        interval(&ours.rounds, &peer.rounds, self.metric.higher_is_better)
    }

    /// Whether a figure is that of one round, so that its spread is not known.
    fn is_of_one_round(&self) -> bool {
        let figures = [&self.ours, &self.peer].into_iter().flatten();
        figures.into_iter().any(|spread| spread.rounds.len() == 1)
    }

    fn missing(&self) -> Option<String> {
        match (&self.ours, &self.peer) {
            (Err(reason), _) => Some(format!("zerosock: {reason}")),
            (_, Err(reason)) => Some(format!("{}: {reason}", self.peer_name)),
            _ => None,
        }
    }

    fn json(&self) -> Value {
        let ours = self.ours.as_ref().ok();
        let peer = self.peer.as_ref().ok();
        let rounds = |figures: Option<&Spread>| figures.map_or(Vec::new(), |it| it.rounds.clone());
        json!({
            "name": self.name,
            "metric": self.metric.name,
            "unit": self.metric.unit,
            "ours": ours.map(|spread| spread.median),
            "peer_name": self.peer_name,
            "peer": peer.map(|spread| spread.median),
            "ratio": self.ratio(),
            // 95 % interval of the mean of the rounds' ratios.
            "ratio_low": self.interval().map(|(low, _)| low),
            "ratio_high": self.interval().map(|(_, high)| high),
            "higher_is_better": self.metric.higher_is_better,
            "ours_best": ours.map(|spread| spread.best),
            "ours_slowest": ours.map(|spread| spread.slowest),
            "ours_rounds": rounds(ours),
            "peer_best": peer.map(|spread| spread.best),
            "peer_slowest": peer.map(|spread| spread.slowest),
            "peer_rounds": rounds(peer),
            // Why a figure is missing.
            "missing": self.missing(),
        })
    }
}

impl Table {
    /// Records a missing contestant, once.
    pub(crate) fn note_missing(&mut self, name: &str, reason: &str) {
        let missing = Missing {
            name: name.to_owned(),
            reason: reason.to_owned(),
        };
        if !self.missing.contains(&missing) {
            self.missing.push(missing);
        }
    }

    /// Adds a row for each contestant but the first, which is zerosock. A contestant that failed is
    /// missing.
    pub(crate) fn add_rows<T>(
        &mut self,
        name: &str,
        metric: Metric,
        outcomes: &Outcomes<T>,
        value: impl Fn(&T) -> f64,
    ) {
        self.note_failures(outcomes);
        for peer in 1..outcomes.0.len() {
            self.compare(name, metric, outcomes, (0, peer), &value);
        }
    }

    /// Adds a row that compares two contestants, zerosock and a peer, by their indices.
    pub(crate) fn compare<T>(
        &mut self,
        name: &str,
        metric: Metric,
        outcomes: &Outcomes<T>,
        (ours, peer): (usize, usize),
        value: impl Fn(&T) -> f64,
    ) {
        self.note_failures(outcomes);
        let peer_name = outcomes.0.get(peer).map(|(title, _)| title.clone());
        self.rows.push(Row {
            name: name.to_owned(),
            metric,
            ours: outcomes.figure(ours, metric, &value),
            peer_name: peer_name.unwrap_or_default(),
            peer: outcomes.figure(peer, metric, &value),
        });
    }

    /// Records the contestants that failed.
    pub(crate) fn note_failures<T>(&mut self, outcomes: &Outcomes<T>) {
        for (title, outcome) in &outcomes.0 {
            if let Err(reason) = outcome {
                self.note_missing(title, reason);
            }
        }
    }

    /// The rows that are worse than those of other releases.
    pub(crate) fn losses(&self) -> impl Iterator<Item = Loss<'_>> {
        let against = |row: &&Row| {
            let comparison = self.comparison.as_ref()?;
            let mut releases = comparison.releases.iter();
            let is_release = releases.any(|release| *release == row.peer_name);
            is_release.then_some(comparison.loss)
        };
        self.rows.iter().filter_map(move |row| {
            let loss = against(&row)?;
            let ratio = match (&row.ours, &row.peer) {
                // What the other release could do, and this one cannot.
                (Err(_), Ok(_)) => 0.0,
                _ => row.ratio()?,
            };
            let is_certain = row.interval().is_none_or(|(_, high)| high < 1.0);
            (ratio < loss).then_some(Loss { row, is_certain })
        })
    }

    /// For each other release, the rows that are worse than its.
    fn comparison_text(&self, out: &mut String) {
        let Some(Comparison { releases, loss }) = &self.comparison else {
            return;
        };
        for release in releases {
            let losses = self.losses().filter(|loss| loss.row.peer_name == *release);
            let losses: Vec<_> = losses.collect();
            let rows = self
                .rows
                .iter()
                .filter(|row| row.peer_name == *release && row.peer.is_ok());
            let (count, all) = (losses.len(), rows.count());
            let _ = writeln!(out, "\nbelow {loss} of {release}: {count} of {all} rows");
            for Loss {
                row, is_certain, ..
            } in losses
            {
                let cell = match row.ours {
                    Ok(_) => ratio_cell(row),
                    Err(_) => "missing".to_owned(),
                };
                let chance = if is_certain { "" } else { ", within the noise" };
                let _ = writeln!(out, "- {}, {}: {cell}{chance}", row.name, row.metric.name);
            }
        }
    }

    /// As text: a table in Markdown.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "## {}{}\n\n{}\n{}\nMedian of {} rounds{} (best to slowest). A ratio above 1 means that \
             zerosock is better.\n",
            self.name,
            self.placement
                .as_ref()
                .map(|at| format!(", placement {at}"))
                .unwrap_or_default(),
            self.method,
            self.machine,
            self.rounds,
            self.most_rounds()
                .map(|most| format!(", {most} for 64 B"))
                .unwrap_or_default(),
        );
        if self.rounds == 1 {
            out.push_str("One round: the spread is not known, and a ratio can be chance.\n\n");
        }
        let header = [
            "case",
            "metric",
            "unit",
            "zerosock",
            "peer",
            "peer's figure",
            "ratio",
        ];
        let mut cells = vec![header.map(str::to_owned).to_vec()];
        // Leave out cells that repeat the row above.
        let (mut name, mut metric) = ("", None);
        for row in &self.rows {
            let same_name = name == row.name;
            let same_metric = same_name && metric == Some(row.metric);
            (name, metric) = (&row.name, Some(row.metric));
            let unless = |same: bool, text: &str| {
                if same { String::new() } else { text.to_owned() }
            };
            cells.push(vec![
                unless(same_name, &row.name),
                unless(same_metric, row.metric.name),
                unless(same_metric, row.metric.unit),
                cell(&row.ours),
                row.peer_name.clone(),
                cell(&row.peer),
                ratio_cell(row),
            ]);
        }
        markdown(&mut out, &cells);
        for grid in &self.grids {
            grid.text(&mut out);
        }
        for missing in &self.missing {
            let _ = writeln!(out, "missing: {}: {}", missing.name, missing.reason);
        }
        self.comparison_text(&mut out);
        out
    }

    /// Rounds of small cases, if they are more than those of the others.
    fn most_rounds(&self) -> Option<usize> {
        let rounds = self.rows.iter().filter_map(|row| row.ours.as_ref().ok());
        let most = rounds.map(|spread| spread.rounds.len()).max();
        most.filter(|most| *most > self.rounds)
    }

    /// As JSON.
    pub(crate) fn json(&self) -> Value {
        json!({
            "table": self.name,
            "machine": self.machine,
            "method": self.method,
            "placement": self.placement,
            "rounds": self.rounds,
            "rows": self.rows.iter().map(Row::json).collect::<Vec<_>>(),
            "grids": self.grids.iter().map(Grid::json).collect::<Vec<_>>(),
            "missing": self.missing,
        })
    }
}

/// In one line, as tables show it.
pub(crate) fn line(error: impl ToString) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim);
    lines.collect::<Vec<_>>().join("; ")
}

/// One table as an object, several as an array of them.
pub(crate) fn json(tables: &[Table]) -> Value {
    match tables {
        [table] => table.json(),
        tables => tables.iter().map(Table::json).collect(),
    }
}

fn cell(figure: &Result<Spread, String>) -> String {
    match figure {
        Ok(spread) if spread.rounds.len() == 1 => number(spread.median),
        Ok(spread) => format!(
            "{} ({} to {})",
            number(spread.median),
            number(spread.best),
            number(spread.slowest)
        ),
        Err(_) => "missing".to_owned(),
    }
}

/// The ratio, and its interval if there are enough rounds.
fn ratio_cell(row: &Row) -> String {
    let Some(ratio) = row.ratio() else {
        return String::new();
    };
    match row.interval() {
        Some((low, high)) => format!("{} ({} to {})", number(ratio), number(low), number(high)),
        None if row.is_of_one_round() => format!("{} (1 round)", number(ratio)),
        None => number(ratio),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEED: Metric = Metric::higher("throughput", "GB/s");

    fn table() -> Table {
        let spread = |rounds: &[f64]| Spread::of(rounds.to_vec(), true).unwrap();
        let mut table = Table {
            name: "local".into(),
            method: "Both sides touch every byte.".into(),
            machine: "two cores".into(),
            placement: None,
            comparison: None,
            rounds: 3,
            rows: vec![
                Row {
                    name: "throughput, 64 KiB".into(),
                    metric: SPEED,
                    ours: Ok(spread(&[20.0, 22.0, 18.0])),
                    peer_name: "Unix stream".into(),
                    peer: Ok(spread(&[5.0, 4.0, 6.0])),
                },
                Row {
                    name: "throughput, 64 KiB".into(),
                    metric: SPEED,
                    ours: Ok(spread(&[20.0, 22.0, 18.0])),
                    peer_name: "iceoryx2".into(),
                    peer: Err("not installed".into()),
                },
            ],
            grids: Vec::new(),
            missing: Vec::new(),
        };
        table.note_missing("iceoryx2", "not installed");
        table.note_missing("iceoryx2", "not installed");
        table
    }

    #[test]
    fn a_row_below_the_limit_is_a_loss_unless_its_interval_reaches_one() {
        let spread = |rounds: &[f64]| Ok(Spread::of(rounds.to_vec(), true).unwrap());
        let row = |name: &str, ours, peer_name: &str, peer| Row {
            name: name.to_owned(),
            metric: SPEED,
            ours,
            peer_name: peer_name.to_owned(),
            peer,
        };
        let steady = &[10.0, 10.1, 9.9, 10.0, 10.0];
        let table = Table {
            comparison: Some(Comparison {
                releases: vec!["/old"],
                loss: 0.97,
            }),
            rows: vec![
                row("even", spread(steady), "/old", spread(steady)),
                row("lost", spread(&[9.0; 5]), "/old", spread(steady)),
                row(
                    "noise",
                    spread(&[9.0, 20.0, 5.0, 9.0, 9.0]),
                    "/old",
                    spread(steady),
                ),
                row("failed", Err("it broke".to_owned()), "/old", spread(steady)),
                row("new", spread(steady), "/old", Err("it cannot".to_owned())),
                row("peer", spread(&[1.0; 5]), "a peer", spread(steady)),
            ],
            ..table()
        };
        let losses = table
            .losses()
            .map(|loss| (loss.row.name.as_str(), loss.is_certain));
        let expected = [("lost", true), ("noise", false), ("failed", true)];
        assert_eq!(losses.collect::<Vec<_>>(), expected);
        let text = table.text();
        assert!(
            text.contains("below 0.97 of /old: 3 of 4 rows\n- lost, throughput: 0.900"),
            "{text}"
        );
        assert!(
            text.contains("within the noise\n- failed, throughput: missing\n"),
            "{text}"
        );
    }

    #[test]
    fn a_reason_is_one_line() {
        assert_eq!(line("one\n  two"), "one; two");
    }

    #[test]
    fn json_has_the_promised_shape() {
        let json = json(&[table()]);
        assert_eq!(json["table"], "local");
        assert_eq!(json["machine"], "two cores");
        let row = &json["rows"][0];
        for (key, value) in [
            ("name", serde_json::json!("throughput, 64 KiB")),
            ("metric", "throughput".into()),
            ("unit", "GB/s".into()),
            ("ours", 20.0.into()),
            ("peer_name", "Unix stream".into()),
            ("peer", 5.0.into()),
            ("ratio", 4.0.into()),
            ("higher_is_better", true.into()),
            ("ours_best", 22.0.into()),
            ("ours_slowest", 18.0.into()),
            ("peer_best", 6.0.into()),
            ("peer_slowest", 4.0.into()),
            ("missing", serde_json::Value::Null),
        ] {
            assert_eq!(row[key], value, "{key}");
        }
        assert_eq!(row["peer_rounds"], serde_json::json!([5.0, 4.0, 6.0]));
        let several = super::json(&[table(), table()]);
        assert_eq!(several[1]["table"], "local");
    }

    #[test]
    fn the_text_distinguishes_two_metrics_of_one_case() {
        let mut table = table();
        let row = |name| Row {
            metric: Metric {
                name,
                unit: "us",
                higher_is_better: false,
            },
            ..table.rows[0].clone()
        };
        let rows = [row("round trip p50"), row("round trip p99")];
        let one_peer_each = rows.clone().map(|row| Row {
            peer_name: "pipe".into(),
            ..row
        });
        table.rows = [rows, one_peer_each].concat();
        table.rows.sort_by_key(|row| row.metric.name);
        let text = table.text();
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("20.0")).collect();
        let metric = |line: &str| line.split('|').nth(2).unwrap().trim().to_owned();
        let metrics: Vec<String> = lines.into_iter().map(metric).collect();
        assert_eq!(metrics, ["round trip p50", "", "round trip p99", ""]);
    }

    #[test]
    fn a_ratio_of_one_round_is_marked() {
        let mut table = table();
        assert!(!table.text().contains("round)"), "{}", table.text());
        assert!(!table.text().contains("One round"));
        table.rounds = 1;
        table.rows[0].ours = Ok(Spread::of(vec![20.0], true).unwrap());
        let text = table.text();
        assert!(
            text.contains("One round: ") && text.contains("4.00 (1 round)"),
            "{text}"
        );
    }

    #[test]
    fn a_row_is_of_two_contestants_and_has_the_reason_of_a_missing_figure() {
        let mut table = table();
        table.rows.clear();
        table.missing.clear();
        let mut outcomes = Outcomes(Vec::new());
        outcomes.push("zerosock", Ok(vec![20.0, 22.0]));
        outcomes.push("pipe", Err("broken".to_owned()));
        outcomes.push("TCP", Ok(vec![f64::NAN, 1.0]));
        table.add_rows("a case", SPEED, &outcomes, |value| *value);
        let [pipe, tcp] = table.rows.as_slice() else {
            panic!("{:?}", table.rows);
        };
        assert_eq!(
            (pipe.peer_name.as_str(), tcp.peer_name.as_str()),
            ("pipe", "TCP")
        );
        assert_eq!(pipe.ours.as_ref().unwrap().median, 21.0);
        assert_eq!(pipe.missing().as_deref(), Some("pipe: broken"));
        assert!(
            tcp.missing()
                .is_some_and(|reason| reason.starts_with("TCP: nothing"))
        );
        assert_eq!(table.missing.len(), 1);
    }

    #[test]
    fn missing_contestants_are_listed_in_text_and_json() {
        let table = table();
        let json = table.json();
        let row = &json["rows"][1];
        assert!(row["peer"].is_null() && row["ratio"].is_null());
        assert_eq!(row["missing"], "iceoryx2: not installed");
        assert_eq!(
            json["missing"],
            serde_json::json!([{"name": "iceoryx2", "reason": "not installed"}])
        );
        let text = table.text();
        assert!(text.contains("missing: iceoryx2: not installed"), "{text}");
        assert!(text.contains("20.0 (22.0 to 18.0)"), "{text}");
        assert!(text.contains("| 4.00 "), "{text}");
    }
}
