//! Measures the cost of a send with and without a copy, once for each class in a process.
//!
//! A class is a kind of socket, a back-end, whether the memory is registered, and a length to
//! within a factor of two. While a class is undecided, submissions alternate between the two modes.
//! A submission is a measurement if all its sends are of one class and one mode, the kernel took
//! all of them in it, and the kernel sends from this socket in place: the time of its system call,
//! divided by its sends. The cheapest measurement of a mode is its cost without disturbance. When
//! both modes have been measured often enough, the cheaper one is kept. Zero copy must be cheaper
//! by a twentieth, because a part of its cost comes later and cannot be measured by itself: the
//! kernel pays for the notification in the interrupt of the device, and posts it in the next call.
//!
//! A class that cannot be measured, because its sockets are always full or its sends always go
//! together with others, is decided after 32768 sends as the documentation of the kernel says
//! (`Documentation/networking/msg_zerocopy.rst`: "only effective at writes over around 10 KB"), and
//! is reported as assumed.
//!
//! After a million sends a class is measured anew, for 32768 sends at most. The old decision is
//! reported meanwhile.
//!
//! # The back-end of senders that keep completions
//! Asking for completions is a system call over the error queue, and none over io_uring; a send is
//! cheaper over the error queue. So the better back-end depends on how often an application asks. CPU
//! seconds of the sender for 10^9 bytes, of 20 rounds (`bench/results/notify.md`), over io_uring and
//! over the error queue:
//!
//! | | asking at each send | at each 32nd |
//! |---|---|---|
//! | UDP, IPv4 | 0.058, 0.065 | 0.056, 0.052 |
//! | UDP, IPv6 | 0.058, 0.065 | 0.058, 0.054 |
//! | TCP, IPv4 | 0.076, 0.071 | 0.074, 0.059 |
//! | TCP, IPv6 | 0.087, 0.078 | 0.084, 0.069 |
//!
//! A measurement as above cannot make this choice. It times the call that submits, and the costs in
//! question are in other calls and in interrupts. Whole rounds of half a second on TCP differ by 40 %,
//! by more than the back-ends do. And an open sender cannot change its back-end: event loops wait for
//! its descriptor. So the choice is a rule, made when a sender is opened. On TCP it takes the error
//! queue. On UDP the lines of the table meet at 2.5 sends for each time of asking: what counts is how
//! the last sender of the process over UDP was used, and the first one takes io_uring.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::SendBackend;
use super::stats::ThresholdBasis;
use crate::sys::{SendMode, SocketKind};

/// Measurements of each mode until a class is decided.
const MEASUREMENTS: u32 = 24;
/// Number of sends after which the mode alternates.
const MIN_RUN: u32 = 32;
/// Number of length classes: one below 256 bytes, one from 16 MiB on, and one for each power of two
/// between.
const SIZES: usize = 18;
const KINDS: usize = 10;
/// The error queue, the ring, and the ring with memory that is registered.
const MEMORY_CLASSES: usize = 3;
/// Number of sends after which a decided class is measured anew.
const REMEASURE_AFTER: u32 = 1 << 20;
/// Number of sends after which an undecided class is decided as assumed, or as it was before.
const MAX_TRIALS: u32 = 1 << 15;
/// The first length class that is assumed to be cheaper in place. It begins at 16 KiB; the class
/// below contains the 10 KB that the kernel's documentation names.
const FIRST_ZERO_COPY_CLASS: usize = 7;

/// Sends for each time of asking for completions from which on the error queue is cheaper on UDP.
const RARE: u64 = 3;
/// Number of sends of a sender whose use counts.
const MIN_USE: u64 = 1024;

/// The last sender over UDP was asked for completions rarely.
static ASKED_RARELY: AtomicBool = AtomicBool::new(false);

/// Whether the error queue is the better back-end of a sender that keeps completions.
pub(super) fn prefers_error_queue(kind: SocketKind) -> bool {
    match kind {
        SocketKind::Tcp4 | SocketKind::Tcp6 => true,
        SocketKind::Udp4 | SocketKind::Udp6 => ASKED_RARELY.load(Relaxed),
        _ => false,
    }
}

/// Takes note of how a sender that keeps completions was used: its sends, and how often it was asked.
pub(super) fn record_use(kind: SocketKind, sends: u64, asked: u64) {
    if matches!(kind, SocketKind::Udp4 | SocketKind::Udp6) && sends >= MIN_USE {
        ASKED_RARELY.store(asked * RARE <= sends, Relaxed);
    }
}

/// Sends for which the mode is decided together.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct Class(usize);

impl Class {
    pub(super) fn of(kind: SocketKind, backend: SendBackend, registered: bool, len: usize) -> Self {
        let kind = match kind {
            SocketKind::Tcp4 => 0,
            SocketKind::Tcp6 => 1,
            SocketKind::Udp4 => 2,
            SocketKind::Udp6 => 3,
            SocketKind::Raw => 4,
            SocketKind::Packet => 5,
            SocketKind::VsockStream => 6,
            SocketKind::VsockMessages => 7,
            SocketKind::OtherStream => 8,
            SocketKind::OtherDatagram => 9,
        };
        let size = (usize::BITS - (len >> 8).leading_zeros()) as usize;
        // Only a ring registers memory.
        let memory_class = match backend {
            SendBackend::Uring => 1 + usize::from(registered),
            SendBackend::ErrorQueue | SendBackend::Copy => 0,
        };
        Self((kind * MEMORY_CLASSES + memory_class) * SIZES + size.min(SIZES - 1))
    }

    /// The mode that is assumed if the class cannot be measured.
    fn assumed(self) -> SendMode {
        match self.0 % SIZES >= FIRST_ZERO_COPY_CLASS {
            true => SendMode::ZeroCopy,
            false => SendMode::Copy,
        }
    }
}

/// The measurements of one mode.
struct ModeCost {
    /// The cheapest measurement so far, in picoseconds per send.
    cheapest: AtomicU64,
    measurements: AtomicU32,
    /// Number of sends in this mode while the class is measured.
    tried: AtomicU32,
}

impl ModeCost {
    const fn new() -> Self {
        Self {
            cheapest: AtomicU64::new(u64::MAX),
            measurements: AtomicU32::new(0),
            tried: AtomicU32::new(0),
        }
    }

    fn clear(&self) {
        self.cheapest.store(u64::MAX, Relaxed);
        self.measurements.store(0, Relaxed);
        self.tried.store(0, Relaxed);
    }
}

struct ClassState {
    copy: ModeCost,
    zero_copy: ModeCost,
    /// See `decision`.
    decided: AtomicU32,
    /// The class is being measured, for the first time or anew.
    open: AtomicBool,
    /// Sends since the class was decided.
    used: AtomicU32,
}

impl ClassState {
    const fn new() -> Self {
        Self {
            copy: ModeCost::new(),
            zero_copy: ModeCost::new(),
            decided: AtomicU32::new(0),
            open: AtomicBool::new(true),
            used: AtomicU32::new(0),
        }
    }

    fn cost_of(&self, mode: SendMode) -> &ModeCost {
        match mode {
            SendMode::Copy => &self.copy,
            SendMode::ZeroCopy => &self.zero_copy,
        }
    }

    fn decision(&self) -> Option<(SendMode, ThresholdBasis)> {
        match self.decided.load(Relaxed) {
            1 => Some((SendMode::Copy, ThresholdBasis::Measured)),
            2 => Some((SendMode::ZeroCopy, ThresholdBasis::Measured)),
            3 => Some((SendMode::Copy, ThresholdBasis::Assumed)),
            4 => Some((SendMode::ZeroCopy, ThresholdBasis::Assumed)),
            _ => None,
        }
    }

    fn decide(&self, mode: SendMode, basis: ThresholdBasis) {
        let measured = 1 + u32::from(mode == SendMode::ZeroCopy);
        let assumed = 2 * u32::from(basis == ThresholdBasis::Assumed);
        self.decided.store(measured + assumed, Relaxed);
        self.used.store(0, Relaxed);
        self.open.store(false, Relaxed);
    }

    /// The mode of the next send: that of an earlier send of the same submission (`before`), the
    /// one to be measured, the decided one, or `assumed`.
    fn mode(&self, before: Option<SendMode>, assumed: SendMode) -> SendMode {
        if self.open.load(Relaxed) {
            let tried = |mode| self.cost_of(mode).tried.load(Relaxed);
            let (copied, zero_copied) = (tried(SendMode::Copy), tried(SendMode::ZeroCopy));
            if copied.saturating_add(zero_copied) < MAX_TRIALS {
                let mode = before.unwrap_or(match copied / MIN_RUN <= zero_copied / MIN_RUN {
                    true => SendMode::Copy,
                    false => SendMode::ZeroCopy,
                });
                self.cost_of(mode).tried.fetch_add(1, Relaxed);
                return mode;
            }
            let (mode, basis) = self
                .decision()
                .unwrap_or((assumed, ThresholdBasis::Assumed));
            self.decide(mode, basis);
        }
        self.decision().map_or(assumed, |(mode, _)| mode)
    }

    fn used(&self, sends: u32) {
        if self.open.load(Relaxed) || self.used.fetch_add(sends, Relaxed) < REMEASURE_AFTER - sends
        {
            return;
        }
        self.copy.clear();
        self.zero_copy.clear();
        self.open.store(true, Relaxed);
    }

    fn record_measurement(&self, mode: SendMode, each: u64) {
        let cost = self.cost_of(mode);
        cost.cheapest.fetch_min(each, Relaxed);
        cost.measurements.fetch_add(1, Relaxed);
        let seen = |cost: &ModeCost| cost.measurements.load(Relaxed) >= MEASUREMENTS;
        if !(seen(&self.copy) && seen(&self.zero_copy)) {
            return;
        }
        let cheapest = |cost: &ModeCost| cost.cheapest.load(Relaxed);
        let (copy, zero_copy) = (cheapest(&self.copy), cheapest(&self.zero_copy));
        let better = match zero_copy.saturating_add(zero_copy / 20) <= copy {
            true => SendMode::ZeroCopy,
            false => SendMode::Copy,
        };
        self.decide(better, ThresholdBasis::Measured);
    }
}

static CLASSES: [ClassState; KINDS * MEMORY_CLASSES * SIZES] =
    [const { ClassState::new() }; KINDS * MEMORY_CLASSES * SIZES];

/// The mode of the next send of a class; `before` is that of an earlier send of the same
/// submission.
pub(super) fn mode(class: Class, before: Option<SendMode>) -> SendMode {
    let assumed = class.assumed();
    let class_state = CLASSES.get(class.0);
    class_state.map_or(assumed, |class_state| class_state.mode(before, assumed))
}

/// Whether submissions of this class are measured.
pub(super) fn is_open(class: Class) -> bool {
    CLASSES
        .get(class.0)
        .is_some_and(|class_state| class_state.open.load(Relaxed))
}

/// Counts sends of a class.
pub(super) fn used(class: Class, sends: u32) {
    if let Some(class_state) = CLASSES.get(class.0) {
        class_state.used(sends);
    }
}

/// Number of sends of a class since it was decided.
#[cfg(test)]
pub(super) fn since(class: Class) -> u32 {
    CLASSES[class.0].used.load(Relaxed)
}

/// Records a submission of `sends` sends that took this time.
pub(super) fn record_measurement(class: Class, mode: SendMode, sends: u32, took: Duration) {
    let Some(class_state) = CLASSES.get(class.0).filter(|_| sends > 0) else {
        return;
    };
    let picoseconds = u64::try_from(took.as_nanos())
        .unwrap_or(u64::MAX)
        .saturating_mul(1000);
    class_state.record_measurement(mode, picoseconds / u64::from(sends));
}

/// The shortest length from which on every decided class goes in place, if there is one, and how it
/// is known: by the two classes around it.
pub(super) fn threshold(
    kind: SocketKind,
    backend: SendBackend,
    registered: bool,
) -> (Option<usize>, ThresholdBasis) {
    if backend == SendBackend::Copy {
        return (None, ThresholdBasis::Unknown);
    }
    let Class(first) = Class::of(kind, backend, registered, 0);
    let classes = CLASSES.get(first..first + SIZES).unwrap_or_default();
    let goes = |wanted| {
        move |class_state: &ClassState| {
            class_state
                .decision()
                .is_some_and(|(mode, _)| mode == wanted)
        }
    };
    let copied = classes.iter().rposition(goes(SendMode::Copy));
    let from = copied.map_or(0, |last| last + 1);
    let above = classes.get(from..).unwrap_or_default().iter();
    let zero_copied = above
        .clone()
        .position(goes(SendMode::ZeroCopy))
        .map(|index| from + index);
    let bounds = [copied, zero_copied].into_iter().flatten();
    let known = bounds.filter_map(|bound| classes.get(bound)?.decision());
    let basis = known
        .map(|(_, basis)| basis)
        .reduce(|one, other| match one {
            ThresholdBasis::Measured => other,
            _ => one,
        });
    let len = zero_copied.map(|size| if size == 0 { 0 } else { 128 << size });
    (len, basis.unwrap_or(ThresholdBasis::Unknown))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_within_a_factor_of_two_share_a_class() {
        let class = |len| Class::of(SocketKind::Tcp4, SendBackend::Uring, false, len);
        assert_eq!(class(0), class(255));
        assert_ne!(class(255), class(256));
        assert_eq!(class(4096), class(8191));
        assert_eq!(class(usize::MAX), class(32 << 20));
        let last = Class::of(
            SocketKind::OtherDatagram,
            SendBackend::Uring,
            true,
            usize::MAX,
        );
        assert!(last.0 < CLASSES.len());
    }

    #[test]
    fn registered_memory_and_back_ends_have_classes_of_their_own() {
        let class = |backend, registered| Class::of(SocketKind::Tcp4, backend, registered, 4096);
        let (ring, queue) = (SendBackend::Uring, SendBackend::ErrorQueue);
        assert_ne!(class(ring, false), class(ring, true));
        assert_ne!(class(ring, false), class(queue, false));
        // No memory is registered for the error queue.
        assert_eq!(class(queue, false), class(queue, true));
    }

    const COPY: SendMode = SendMode::Copy;

    #[test]
    fn the_error_queue_is_for_completions_that_are_rarely_asked_for() {
        let udp = || prefers_error_queue(SocketKind::Udp4);
        assert!(!udp() && prefers_error_queue(SocketKind::Tcp6));
        assert!(!prefers_error_queue(SocketKind::VsockStream));
        for (sends, asked, rarely) in [
            (MIN_USE, MIN_USE / 32, true),
            // Too few to count.
            (MIN_USE - 1, MIN_USE - 1, true),
            (MIN_USE, MIN_USE / 2, false),
            (MIN_USE, 0, true),
            (MIN_USE, MIN_USE, false),
        ] {
            record_use(SocketKind::Udp6, sends, asked);
            assert_eq!(udp(), rarely, "{sends} sends, {asked}");
        }
        // Streams do not count.
        record_use(SocketKind::Tcp4, MIN_USE, 0);
        assert!(!udp());
    }

    #[test]
    fn a_decision_is_measured_anew_and_stays_without_measurements() {
        let class_state = ClassState::new();
        let record = |copy, zero_copy| {
            for _ in 0..MEASUREMENTS {
                class_state.record_measurement(SendMode::Copy, copy);
                class_state.record_measurement(SendMode::ZeroCopy, zero_copy);
            }
        };
        record(1000, 500);
        assert_eq!(class_state.mode(None, COPY), SendMode::ZeroCopy);
        for _ in 0..REMEASURE_AFTER / 1024 - 1 {
            class_state.used(1024);
            assert_eq!(class_state.mode(None, COPY), SendMode::ZeroCopy);
        }
        class_state.used(1024);
        // Both modes are tried, without a measurement.
        let copies = (0..MAX_TRIALS).filter(|_| class_state.mode(None, COPY) == SendMode::Copy);
        assert_eq!(copies.count(), MAX_TRIALS as usize / 2);
        assert!((0..MAX_TRIALS).all(|_| class_state.mode(None, COPY) == SendMode::ZeroCopy));
        assert_eq!(
            class_state.decision(),
            Some((SendMode::ZeroCopy, ThresholdBasis::Measured))
        );
        // Later measurements can reverse the decision.
        for _ in 0..REMEASURE_AFTER / 1024 {
            class_state.used(1024);
        }
        record(500, 1000);
        assert!((0..MAX_TRIALS).all(|_| class_state.mode(None, COPY) == SendMode::Copy));
    }

    #[test]
    fn a_class_without_measurements_is_assumed_and_measured_anew() {
        for assumed in [SendMode::Copy, SendMode::ZeroCopy] {
            let class_state = ClassState::new();
            let modes = |class_state: &ClassState| {
                let modes = (0..MAX_TRIALS).map(|_| class_state.mode(None, assumed));
                modes.filter(|&mode| mode == SendMode::Copy).count()
            };
            assert_eq!(modes(&class_state), MAX_TRIALS as usize / 2);
            assert_eq!(class_state.decision(), None);
            assert_eq!(class_state.mode(None, assumed), assumed);
            assert_eq!(
                class_state.decision(),
                Some((assumed, ThresholdBasis::Assumed))
            );
            for _ in 0..REMEASURE_AFTER / 1024 {
                assert_eq!(class_state.mode(None, assumed), assumed);
                class_state.used(1024);
            }
            assert_eq!(modes(&class_state), MAX_TRIALS as usize / 2);
            for _ in 0..MEASUREMENTS {
                class_state.record_measurement(SendMode::Copy, 1000);
                class_state.record_measurement(SendMode::ZeroCopy, 500);
            }
            assert_eq!(
                class_state.decision(),
                Some((SendMode::ZeroCopy, ThresholdBasis::Measured))
            );
        }
    }

    #[test]
    fn zero_copy_is_assumed_from_16_kib_on() {
        for kind in [SocketKind::Tcp4, SocketKind::OtherDatagram] {
            let assumed = |len| Class::of(kind, SendBackend::Uring, true, len).assumed();
            assert_eq!(assumed(0), SendMode::Copy);
            assert_eq!(assumed((16 << 10) - 1), SendMode::Copy);
            assert_eq!(assumed(16 << 10), SendMode::ZeroCopy);
            assert_eq!(assumed(usize::MAX), SendMode::ZeroCopy);
        }
    }

    #[test]
    fn sends_of_one_submission_have_one_mode_and_submissions_alternate() {
        for together in [1, 31, 32, 33, 48, 64, 256] {
            let class_state = ClassState::new();
            class_state.mode(None, COPY);
            let mut measurements = [0u32; 2];
            while measurements
                .iter()
                .any(|&measurements| measurements < MEASUREMENTS)
            {
                let first = class_state.mode(None, COPY);
                assert!((1..together).all(|_| class_state.mode(Some(first), COPY) == first));
                measurements[usize::from(first == SendMode::ZeroCopy)] += 1;
                assert_eq!(class_state.decision(), None, "{together}: {measurements:?}");
            }
        }
    }

    fn decide(copy: u64, zero_copy: u64) -> SendMode {
        let class_state = ClassState::new();
        let mut seen = [0; 2];
        while class_state.decision().is_none() {
            let mode = class_state.mode(None, COPY);
            let noise = u64::from(seen[0] as u32 % 7) * 1000;
            seen[usize::from(mode == SendMode::ZeroCopy)] += 1;
            class_state.record_measurement(
                mode,
                noise
                    + if mode == SendMode::Copy {
                        copy
                    } else {
                        zero_copy
                    },
            );
            assert!(seen.iter().sum::<i32>() < 1000, "it never decides");
        }
        class_state.mode(None, COPY)
    }

    #[test]
    fn zero_copy_must_be_cheaper_by_a_twentieth() {
        assert_eq!(decide(1_000_000, 800_000), SendMode::ZeroCopy);
        assert_eq!(decide(1_000_000, 980_000), SendMode::Copy);
        assert_eq!(decide(1_000_000, 1_500_000), SendMode::Copy);
    }

    #[test]
    fn the_threshold_is_the_least_length_that_goes_in_place() {
        // A kind that no other test sends over.
        let class = |len| Class::of(SocketKind::OtherDatagram, SendBackend::Uring, true, len).0;
        let threshold = || threshold(SocketKind::OtherDatagram, SendBackend::Uring, true);
        let decide = |len, mode, basis| CLASSES[class(len)].decide(mode, basis);
        assert_eq!(threshold(), (None, ThresholdBasis::Unknown));
        decide(16_384, SendMode::ZeroCopy, ThresholdBasis::Measured);
        assert_eq!(threshold(), (Some(16_384), ThresholdBasis::Measured));
        decide(1024, SendMode::Copy, ThresholdBasis::Assumed);
        assert_eq!(threshold(), (Some(16_384), ThresholdBasis::Assumed));
        decide(2048, SendMode::Copy, ThresholdBasis::Measured);
        assert_eq!(threshold(), (Some(16_384), ThresholdBasis::Measured));
        decide(16_384, SendMode::ZeroCopy, ThresholdBasis::Assumed);
        assert_eq!(threshold(), (Some(16_384), ThresholdBasis::Assumed));
        decide(32_768, SendMode::Copy, ThresholdBasis::Measured);
        // A longer one is copied.
        assert_eq!(threshold(), (None, ThresholdBasis::Measured));
        decide(usize::MAX, SendMode::ZeroCopy, ThresholdBasis::Measured);
        assert_eq!(threshold(), (Some(16 << 20), ThresholdBasis::Measured));
        assert_eq!(class((16 << 20) - 1) + 1, class(16 << 20));
    }

    #[test]
    fn the_copying_back_end_has_no_threshold() {
        let class = Class::of(
            SocketKind::VsockMessages,
            SendBackend::ErrorQueue,
            false,
            16_384,
        );
        CLASSES[class.0].decide(SendMode::ZeroCopy, ThresholdBasis::Measured);
        let threshold = |backend| threshold(SocketKind::VsockMessages, backend, false);
        let found = (Some(16_384), ThresholdBasis::Measured);
        assert_eq!(threshold(SendBackend::ErrorQueue), found);
        assert_eq!(
            threshold(SendBackend::Copy),
            (None, ThresholdBasis::Unknown)
        );
    }
}
