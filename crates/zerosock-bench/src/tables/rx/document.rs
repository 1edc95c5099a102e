//! The figures of a VM in the form of the two tables of the kernel's patch set on zero-copy receive ("[RFC PATCH v3
//! 00/11] virtio/vsock: experimental zerocopy receive", 6 November 2022), beside those of the patch set.

use super::rows::SIZES;
use crate::report::{Grid, Line, Metric, Outcomes};
use crate::vm::Figures;

/// "Total size of data to send is 2G".
const TOTAL: f64 = (2u64 << 30) as f64;

const LOOPS: &str = "A / B, s";
const CALLS: &str = "C, s";
const CALL: &str = "D, ns";

const NOTE: &str = "Bytes to send: 2 GiB. A: seconds of the server's loop. B: seconds of the client's loop. C: of \
    them, in calls that dequeue. D: nanoseconds of these calls for one dequeue. Ours: the medians, in proportion from \
    the measured time to 2 GiB; the client reads every byte, which counts in B and not in C and D (that of the patch \
    set reads none). The patch set: vhost-vsock and a patched guest on a Celeron N2930 with four cores; its line C is \
    lost in the archive, but for two figures that its text repeats.";

/// Figures of the patch set for one way to dequeue.
struct Published {
    way: &'static str,
    loops: [[f64; 2]; SIZES.len()],
    /// 0: lost.
    calls: [f64; SIZES.len()],
    call: [f64; SIZES.len()],
}

/// One direction.
pub(super) struct Direction {
    title: &'static str,
    note: &'static str,
    /// Each way's name, and which contestant it is.
    ways: &'static [(&'static str, usize)],
    published: [Published; 2],
}

const COPY: &str = "patch set: copy";
const ZERO_COPY: &str = "patch set: zero-copy";

pub(super) const TO_GUEST: Direction = Direction {
    title: "H2G: the host sends, the guest dequeues",
    note: NOTE,
    ways: &[
        ("copy, AF_VSOCK", 0),
        ("copy, endpoint", 2),
        ("in place, endpoint", 3),
        ("in place, polling, endpoint", 4),
    ],
    published: [
        Published {
            way: COPY,
            loops: [
                [1.5, 5.3],
                [1.55, 5.00],
                [1.60, 5.00],
                [1.65, 5.00],
                [1.65, 5.00],
                [1.74, 5.00],
            ],
            calls: [0.0, 0.0, 0.0, 0.0, 2.42, 0.0],
            call: [17145.0, 24172.0, 72650.0, 143_496.0, 295_960.0, 674_146.0],
        },
        Published {
            way: ZERO_COPY,
            loops: [
                [1.10, 6.21],
                [1.10, 6.00],
                [1.10, 5.48],
                [1.10, 5.38],
                [1.10, 5.35],
                [1.10, 5.35],
            ],
            calls: [0.0, 0.0, 0.0, 0.0, 1.25, 0.0],
            call: [41855.0, 46339.0, 71988.0, 106_000.0, 153_064.0, 242_036.0],
        },
    ],
};

pub(super) const TO_HOST: Direction = Direction {
    title: "G2H: the guest sends, the host dequeues",
    note: "Figures as in the table above.",
    ways: &[
        ("copy, AF_VSOCK", 0),
        ("in place, AF_VSOCK", 1),
        ("in place, polling, AF_VSOCK", 2),
        ("copy, endpoint", 6),
        ("in place, endpoint", 7),
        ("in place, polling, endpoint", 8),
    ],
    published: [
        Published {
            way: COPY,
            loops: [
                [2.3, 2.4],
                [2.48, 2.53],
                [2.34, 2.38],
                [2.73, 2.76],
                [2.65, 2.68],
                [3.26, 3.35],
            ],
            calls: [0.0; 6],
            call: [7039.0, 15074.0, 34975.0, 89938.0, 162_384.0, 438_278.0],
        },
        Published {
            way: ZERO_COPY,
            loops: [
                [2.37, 2.42],
                [2.36, 1.96],
                [2.36, 2.42],
                [2.43, 2.43],
                [2.42, 2.47],
                [2.42, 2.46],
            ],
            calls: [0.0; 6],
            call: [13598.0, 15821.0, 29574.0, 43265.0, 71771.0, 150_927.0],
        },
    ],
};

impl Direction {
    /// The table, without figures of ours.
    pub(super) fn table(&self) -> Grid {
        let line = |way: &str, figure, cells| Line {
            way: way.to_owned(),
            figure,
            cells,
        };
        let known = |figure: f64| Vec::from_iter((figure > 0.0).then_some(figure));
        let ours = self.ways.iter().flat_map(|(way, _)| {
            [LOOPS, CALLS, CALL].map(|figure| line(way, figure, vec![Vec::new(); SIZES.len()]))
        });
        let published = self.published.iter().flat_map(|it| {
            [
                line(it.way, LOOPS, it.loops.map(Vec::from).into()),
                line(it.way, CALLS, it.calls.map(known).into()),
                line(it.way, CALL, it.call.map(known).into()),
            ]
        });
        Grid {
            title: self.title,
            note: self.note,
            columns: SIZES.map(|(_, name)| name).into(),
            lines: ours.chain(published).collect(),
        }
    }

    /// Puts in the figures of one size, where they were measured.
    pub(super) fn fill(&self, table: &mut Grid, size: usize, outcomes: &Outcomes<Figures>) {
        let Some(column) = SIZES.iter().position(|(bytes, _)| *bytes == size) else {
            return;
        };
        let pieces = TOTAL / size as f64;
        for (&(_, way), lines) in self.ways.iter().zip(table.lines.chunks_mut(3)) {
            let median = |value: &dyn Fn(&Figures) -> f64| {
                let figure = outcomes.figure(way, Metric::lower("", ""), value);
                figure.map(|spread| spread.median).ok()
            };
            let sender = |figures: &Figures| {
                let sent = figures.sent.unwrap_or_default();
                each(Some(sent.nanoseconds), sent.messages) * pieces / 1e9
            };
            let receiver = |figures: &Figures| {
                let it = figures.outcome;
                each(Some(it.nanoseconds), it.messages) * pieces / 1e9
            };
            let call = |figures: &Figures| each(figures.outcome.calls, figures.outcome.messages);
            let (sent, received, call) = (median(&sender), median(&receiver), median(&call));
            let cells = [
                sent.zip(received)
                    .map(|(sent, received)| vec![sent, received]),
                call.map(|call| vec![call * pieces / 1e9]),
                call.map(|call| vec![call]),
            ];
            for (line, cell) in lines.iter_mut().zip(cells) {
                line.cells[column] = cell.unwrap_or_default();
            }
        }
    }
}

/// Nanoseconds of one of `count` messages; not a number if they were not measured.
fn each(nanoseconds: Option<u64>, count: u64) -> f64 {
    match nanoseconds {
        Some(nanoseconds) if count > 0 => nanoseconds as f64 / count as f64,
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::order::Outcome;

    #[test]
    fn figures_are_for_two_gib_and_stand_beside_those_of_the_patch_set() {
        let mut table = TO_GUEST.table();
        let figures = Figures {
            sent: Some(Outcome {
                messages: 4,
                nanoseconds: 4_000_000,
                ..Outcome::default()
            }),
            ..Figures::of(Outcome {
                messages: 2,
                nanoseconds: 6_000_000,
                busy: Some(5_000_000),
                calls: Some(1_000_000),
                ..Outcome::default()
            })
        };
        let mut outcomes = Outcomes(Vec::new());
        outcomes.push("copy", Ok(vec![figures]));
        TO_GUEST.fill(&mut table, 512 << 10, &outcomes);
        let line = |way: &str, figure: &str| {
            let mut lines = table.lines.iter();
            let line = lines.find(|line| line.way == way && line.figure == figure);
            line.expect("a line").cells.clone()
        };
        // 4096 pieces.
        assert_eq!(line("copy, AF_VSOCK", LOOPS)[5], [4.096, 12.288]);
        assert_eq!(line("copy, AF_VSOCK", CALLS)[5], [2.048]);
        assert_eq!(line("copy, AF_VSOCK", CALL)[5], [500_000.0]);
        assert!(line("copy, AF_VSOCK", LOOPS)[4].is_empty());
        assert!(line("in place, endpoint", CALL)[5].is_empty());
        assert_eq!(line(COPY, LOOPS)[0], [1.5, 5.3]);
        assert!(line(ZERO_COPY, CALLS)[0].is_empty());
        // The text of the patch set repeats C of 256 KiB: that of 8192 wake-ups.
        for way in [COPY, ZERO_COPY] {
            let (calls, call) = (line(way, CALLS)[4][0], line(way, CALL)[4][0]);
            assert!((calls - call * 8192.0 / 1e9).abs() < 0.01, "{way}");
        }
    }
}
