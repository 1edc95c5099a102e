//! Rounds: each contestant is measured once per round, and another one goes first each time.
//!
//! # Invariants
//! - Contestants alternate within one run, so that a drift of the machine affects all of them.
//! - A contestant that fails is not run again and keeps its reason; the others continue.

/// Median, best and slowest of a contestant's rounds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) best: f64,
    pub(crate) slowest: f64,
    /// In the order of measurement.
    pub(crate) rounds: Vec<f64>,
}

impl Spread {
    /// `None` without rounds.
    pub(crate) fn of(rounds: Vec<f64>, higher_is_better: bool) -> Option<Spread> {
        let mut sorted = rounds.clone();
        sorted.sort_by(f64::total_cmp);
        let (&least, &most) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        };
        let (best, slowest) = if higher_is_better {
            (most, least)
        } else {
            (least, most)
        };
        Some(Spread {
            median,
            best,
            slowest,
            rounds,
        })
    }
}

/// Ratio of the two figures: above 1 always means that zerosock is better.
pub(crate) fn ratio(ours: f64, peer: f64, higher_is_better: bool) -> Option<f64> {
    let ratio = if higher_is_better {
        ours / peer
    } else {
        peer / ours
    };
    ratio.is_finite().then_some(ratio)
}

/// 95 % interval of the mean of the rounds' ratios (Student's t, of their logarithms). `None` of
/// fewer than five pairs.
pub(crate) fn interval(ours: &[f64], peer: &[f64], higher_is_better: bool) -> Option<(f64, f64)> {
    if ours.len() != peer.len() || ours.len() < 5 {
        return None;
    }
    let pairs = ours.iter().zip(peer);
    let logs = pairs.map(|(&ours, &peer)| ratio(ours, peer, higher_is_better).map(f64::ln));
    let logs: Vec<f64> = logs.collect::<Option<_>>()?;
    let count = logs.len() as f64;
    let mean = logs.iter().sum::<f64>() / count;
    let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
    let error = (squares / (count - 1.0) / count).sqrt();
    let reach = student(logs.len() - 1) * error;
    let (low, high) = ((mean - reach).exp(), (mean + reach).exp());
    (low.is_finite() && high.is_finite()).then_some((low, high))
}

/// Two-sided 95 % quantile of Student's t distribution for the degrees of freedom; from 30 on
/// within 0.01.
fn student(freedom: usize) -> f64 {
    const FIRST: [f64; 29] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
        2.052, 2.048, 2.045,
    ];
    match freedom.checked_sub(1).map(|at| FIRST.get(at)) {
        Some(Some(&factor)) => factor,
        Some(None) => 1.96 + 2.5 / freedom as f64,
        None => f64::INFINITY,
    }
}

/// Runs `rounds` rounds of `contestants` contestants; `run(round, contestant)` is one measurement.
/// Returns for each contestant all outcomes, or the reason of its first failure.
pub(crate) fn alternate<T>(
    rounds: usize,
    contestants: usize,
    mut run: impl FnMut(usize, usize) -> Result<T, String>,
) -> Vec<Result<Vec<T>, String>> {
    let mut outcomes: Vec<_> = (0..contestants).map(|_| Ok(Vec::new())).collect();
    for round in 0..rounds {
        for step in 0..contestants {
            let contestant = (round + step) % contestants;
            let Some(Ok(so_far)) = outcomes.get_mut(contestant) else {
                continue;
            };
            match run(round, contestant) {
                Ok(outcome) => so_far.push(outcome),
                Err(reason) => outcomes[contestant] = Err(reason),
            }
        }
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_and_the_slowest_the_worst() {
        let spread = Spread::of(vec![5.0, 1.0, 3.0], true).unwrap();
        assert_eq!(
            (spread.median, spread.best, spread.slowest),
            (3.0, 5.0, 1.0)
        );
        assert_eq!(spread.rounds, [5.0, 1.0, 3.0]);
        let spread = Spread::of(vec![4.0, 1.0, 3.0, 100.0], false).unwrap();
        assert_eq!(
            (spread.median, spread.best, spread.slowest),
            (3.5, 1.0, 100.0)
        );
        assert_eq!(Spread::of(Vec::new(), true), None);
    }

    #[test]
    fn a_ratio_above_one_is_better_for_us() {
        assert_eq!(ratio(10.0, 5.0, true), Some(2.0));
        assert_eq!(ratio(5.0, 10.0, false), Some(2.0));
        assert_eq!(ratio(1.0, 0.0, true), None);
    }

    #[test]
    fn an_interval_is_around_the_mean_of_the_ratios() {
        let ours = [2.0, 2.0, 2.0, 2.0, 2.0];
        let (low, high) = interval(&ours, &[1.0; 5], true).unwrap();
        assert!((low - 2.0).abs() < 1e-9 && (high - 2.0).abs() < 1e-9);
        // Logarithms -a, -a, 0, a, a: deviation a, error a / sqrt(5), and 2.776 of that.
        let a = 0.1f64;
        let ours = [-a, -a, 0.0, a, a].map(f64::exp);
        let (low, high) = interval(&ours, &[1.0; 5], true).unwrap();
        let reach = 2.776 * a / 5f64.sqrt();
        assert!((low - (-reach).exp()).abs() < 1e-9 && (high - reach.exp()).abs() < 1e-9);
        assert_eq!(interval(&[1.0; 4], &[1.0; 4], true), None);
        assert_eq!(interval(&[1.0; 5], &[1.0; 6], true), None);
        assert!((student(40) - 2.021).abs() < 0.01 && (student(30) - 2.042).abs() < 0.01);
    }

    #[test]
    fn contestants_alternate_and_one_that_fails_is_not_run_again() {
        let mut order = Vec::new();
        let outcomes = alternate(3, 3, |round, contestant| {
            order.push(contestant);
            match (round, contestant) {
                (1, 2) => Err("broke".to_owned()),
                _ => Ok(round * 10 + contestant),
            }
        });
        assert_eq!(order, [0, 1, 2, 1, 2, 0, 0, 1]);
        assert_eq!(
            outcomes,
            [
                Ok(vec![0, 10, 20]),
                Ok(vec![1, 11, 21]),
                Err("broke".to_owned())
            ]
        );
    }
}
