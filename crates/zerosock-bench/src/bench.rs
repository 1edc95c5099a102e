//! A table while it is measured: what it is measured with, and how its cases are run.
//!
//! A table describes each of its cases by data: the contestants, as a name and whatever tells them
//! apart, zerosock first. [`Bench::measure`] has them take turns; [`Table::add_rows`] and
//! [`Table::compare`] turn the outcomes into rows.

use std::fmt::Display;
use std::io::IsTerminal;

use crate::args::Settings;
use crate::binary::Binary;
use crate::pair::{Cores, Task};
use crate::report::{Outcomes, Table};
use crate::rounds::alternate;
use crate::worker::order::{Job, Outcome, Wait};

/// Least rounds of a case of 64 B that compares releases: its figures differ most from round to round.
pub(crate) const SMALL_ROUNDS: usize = 12;

/// See the [module](self).
pub(crate) struct Bench<'s> {
    pub(crate) settings: &'s Settings,
    pub(crate) cores: Cores,
    pub(crate) table: Table,
}

impl Bench<'_> {
    /// The first contestant, and those of the others that were selected.
    pub(crate) fn wanted<C>(
        &self,
        contestants: impl IntoIterator<Item = (impl Display, C)>,
    ) -> Vec<(String, C)> {
        let mut contestants = contestants.into_iter();
        let titled = |(title, contestant): (_, C)| (format!("{title}"), contestant);
        let first = contestants.next().map(titled);
        let others = contestants.map(titled);
        let others = others.filter(|(title, _)| self.settings.is_against(title));
        first.into_iter().chain(others).collect()
    }

    /// As [`wanted`](Self::wanted), with the releases to compare with behind the first.
    pub(crate) fn wanted_with<C>(
        &self,
        contestants: impl IntoIterator<Item = (impl Display, C)>,
        release: impl Fn(Binary) -> C,
    ) -> Vec<(String, C)> {
        let mut wanted = self.wanted(contestants);
        let releases = self.settings.releases.iter();
        let releases = releases.map(|one| (one.title().to_owned(), release(*one)));
        let others = wanted.split_off(wanted.len().min(1));
        wanted.into_iter().chain(releases).chain(others).collect()
    }

    /// Measures the contestants of a case in turn; `run` is one measurement.
    pub(crate) fn measure<C, T>(
        &self,
        case: &str,
        contestants: &[(impl Display, C)],
        run: impl FnMut(&C) -> Result<T, String>,
    ) -> Outcomes<T> {
        self.measure_at_most(usize::MAX, case, contestants, run)
    }

    /// As [`measure`](Self::measure), in at most `most` rounds.
    pub(crate) fn measure_at_most<C, T>(
        &self,
        most: usize,
        case: &str,
        contestants: &[(impl Display, C)],
        mut run: impl FnMut(&C) -> Result<T, String>,
    ) -> Outcomes<T> {
        let Settings {
            quick, releases, ..
        } = self.settings;
        let least = match releases.is_empty() || *quick || !case.contains("64 B") {
            true => 1,
            false => SMALL_ROUNDS,
        };
        let rounds = self.table.rounds.max(least).min(most);
        let outcomes = alternate(rounds, contestants.len(), |round, at| {
            let (title, contestant) = &contestants[at];
            print_progress(&format!("{case}: round {}, {title}", round + 1));
            run(contestant)
        });
        let titles = contestants.iter().map(|(title, _)| title.to_string());
        Outcomes(titles.zip(outcomes).collect())
    }

    /// The cores of the placement, if there is one: for processes that are on no core in particular otherwise.
    pub(crate) fn placed_cores(&self) -> Cores {
        match self.table.placement {
            Some(_) => self.cores,
            None => Cores::ANY,
        }
    }

    /// A measurement of a pair of processes, each on its core.
    pub(crate) fn task(&self, timed: Job, wait: Wait, size: usize) -> Task {
        Task {
            timed,
            wait,
            size,
            warm: self.settings.warm,
            time: self.settings.time,
            cores: self.cores,
            how: None,
        }
    }
}

/// Prints a line about the course of a measurement, if standard error is a terminal.
pub(crate) fn print_progress(line: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("{line}");
    }
}

/// The figures of a pair of processes, in messages of `size` bytes.
impl Outcome {
    pub(crate) fn mb_s(&self, size: usize) -> f64 {
        self.gb_s(size) * 1e3
    }

    pub(crate) fn gb_s(&self, size: usize) -> f64 {
        self.messages as f64 * size as f64 / self.nanoseconds as f64
    }

    /// Median of the round trips.
    pub(crate) fn p50_us(&self) -> f64 {
        microseconds(self.p50)
    }

    /// 99th percentile of the round trips.
    pub(crate) fn p99_us(&self) -> f64 {
        microseconds(self.p99)
    }
}

fn microseconds(nanoseconds: Option<u64>) -> f64 {
    nanoseconds.map_or(f64::NAN, |nanoseconds| nanoseconds as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::BenchArgs;

    #[test]
    fn small_cases_of_a_comparison_have_more_rounds() {
        let own = std::env::current_exe().unwrap();
        for (quick, small) in [(None, SMALL_ROUNDS), (Some("--quick"), 1)] {
            let words = ["bench", "device", "--against-binary", own.to_str().unwrap()];
            let args = BenchArgs::parse_from(words.into_iter().chain(quick));
            let settings = &Settings::new(args).unwrap();
            let bench = Bench {
                settings,
                cores: Cores::ANY,
                table: Table {
                    name: String::new(),
                    method: String::new(),
                    machine: String::new(),
                    placement: None,
                    rounds: settings.rounds,
                    comparison: None,
                    rows: Vec::new(),
                    grids: Vec::new(),
                    missing: Vec::new(),
                },
            };
            let rounds = |case: &str| {
                let outcomes = bench.measure(case, &[("zerosock", ())], |()| Ok(()));
                outcomes.0[0].1.as_ref().unwrap().len()
            };
            assert_eq!(rounds("to host, packets of 64 B"), small);
            assert_eq!(rounds("to host, packets of 64 KiB"), settings.rounds);
        }
    }

    #[test]
    fn figures_are_in_their_units() {
        let outcome = Outcome {
            messages: 1000,
            nanoseconds: 1_000_000,
            p50: Some(1500),
            ..Outcome::default()
        };
        assert_eq!((outcome.mb_s(4000), outcome.gb_s(4000)), (4000.0, 4.0));
        assert_eq!(outcome.p50_us(), 1.5);
        assert!(outcome.p99_us().is_nan());
    }
}
