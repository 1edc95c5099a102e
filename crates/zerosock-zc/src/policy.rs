//! Decides whether a send is copied.
//!
//! A send without a copy has costs of its own: pages are pinned, and a notification is posted and
//! read. Below a threshold a copy is cheaper. The threshold depends on the kind of socket, on the
//! device behind it, and on whether the memory is registered, so that it is measured, once in a
//! process for each kind of socket and size class, with the sends that the program makes anyway
//! ([`calibration`]). A socket on which the kernel reports copies is rarely tried again.

use super::SendBackend;
use super::calibration::{self, Class};
use super::message::Copying;
use super::stats::{CopyReason, OffReason};
use crate::sys::{SendMode, SocketKind};

/// Number of consecutive notifications that say "copied" after which zero copy is switched off.
const MAX_COPIED: u32 = 16;
/// Number of sends after which zero copy is tried again. It doubles each time.
const FIRST_PAUSE: u64 = 1 << 10;
/// Number of sends after which a class is informed of them: classes are shared by the whole
/// process. It is a prime, so that each class is informed in turn also when lengths follow a
/// pattern.
const REPORT_INTERVAL: u32 = 1021;
/// The longest pause, in sends.
const MAX_PAUSE: u64 = 1 << 20;

/// The length from which on a buffer is sent in place.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Threshold {
    /// The measured length; 16 KiB where that cannot be measured ([`ThresholdBasis`](super::ThresholdBasis)).
    #[default]
    Measured,
    /// This many bytes.
    Bytes(usize),
}

pub(super) struct Policy {
    kind: SocketKind,
    backend: SendBackend,
    threshold: Threshold,
    /// Sends since the classes were informed.
    since: u32,
    /// Class and mode of the last send. Sends of one submission and class have one mode: otherwise
    /// their cost could not be measured.
    last: Option<(Class, SendMode)>,
    /// Why the kernel never sends from this socket without a copy.
    disabled: Option<OffReason>,
    /// The last notification said that the kernel did not copy.
    in_place: bool,
    /// Notifications in a row that said "copied".
    copied: u32,
    /// Sends until zero copy is tried again; none while it is on.
    pause: Option<u64>,
    next_pause: u64,
}

impl Policy {
    pub(super) fn new(kind: SocketKind, backend: SendBackend, threshold: Threshold) -> Self {
        Self {
            kind,
            backend,
            threshold,
            since: 0,
            last: None,
            disabled: (backend == SendBackend::Copy).then_some(OffReason::BackendCopies),
            in_place: false,
            copied: 0,
            pause: None,
            next_pause: FIRST_PAUSE,
        }
    }

    /// How to send `len` bytes.
    pub(super) fn mode(&mut self, wish: Copying, len: usize, registered: bool) -> SendMode {
        match wish {
            Copying::Always => SendMode::Copy,
            _ if self.disabled.is_some() => SendMode::Copy,
            Copying::Never => SendMode::ZeroCopy,
            Copying::Auto => self.choose(len, registered),
        }
    }

    fn choose(&mut self, len: usize, registered: bool) -> SendMode {
        if let Some(left) = &mut self.pause {
            *left = left.saturating_sub(1);
            if *left > 0 {
                return SendMode::Copy;
            }
            // One more notification that says "copied" switches zero copy off again.
            self.pause = None;
            self.copied = MAX_COPIED - 1;
        }
        let in_place = match self.threshold {
            Threshold::Bytes(bytes) => len >= bytes,
            Threshold::Measured => {
                let class = Class::of(self.kind, self.backend, registered, len);
                self.since += 1;
                if self.since == REPORT_INTERVAL {
                    self.since = 0;
                    calibration::used(class, REPORT_INTERVAL);
                }
                let before = self.last.filter(|&(last, _)| last == class);
                let mode = calibration::mode(class, before.map(|(_, mode)| mode));
                self.last = Some((class, mode));
                return mode;
            }
        };
        if in_place {
            SendMode::ZeroCopy
        } else {
            SendMode::Copy
        }
    }

    /// Takes note of a submission: later sends may have another mode.
    pub(super) fn submitted(&mut self) {
        self.last = None;
    }

    /// Takes note of a notification, which says whether the kernel copied.
    pub(super) fn notified(&mut self, copied: bool) {
        self.in_place = !copied;
        if !copied {
            self.copied = 0;
            self.next_pause = FIRST_PAUSE;
            return;
        }
        self.copied += 1;
        if self.copied >= MAX_COPIED && self.pause.is_none() {
            self.copied = 0;
            self.pause = Some(self.next_pause);
            self.next_pause = (self.next_pause * 2).min(MAX_PAUSE);
        }
    }

    /// Disables zero copy for good: the kernel refused it on this socket.
    pub(super) fn disable(&mut self) {
        self.disabled = Some(OffReason::RefusedByKernel);
    }

    /// Whether zero copy is off for good.
    pub(super) fn is_disabled(&self) -> bool {
        self.disabled.is_some()
    }

    /// Why zero copy is off, if it is: for good, or for now because the kernel copied.
    pub(super) fn off(&self) -> Option<OffReason> {
        let paused = self.pause.map(|_| OffReason::CopiedByKernel);
        self.disabled.or(paused)
    }

    /// Why a send for which [`mode`](Self::mode) has just returned [`SendMode::Copy`] is copied.
    pub(super) fn copy_reason(&self, wish: Copying) -> CopyReason {
        match (wish, self.off()) {
            (Copying::Always, _) => CopyReason::Request,
            (_, Some(_)) => CopyReason::Off,
            (_, None) => CopyReason::Short,
        }
    }

    pub(super) fn class(&self, registered: bool, len: usize) -> Option<Class> {
        let measured = self.threshold == Threshold::Measured && self.off().is_none();
        measured.then(|| Class::of(self.kind, self.backend, registered, len))
    }

    /// The kind of the socket.
    pub(super) fn kind(&self) -> SocketKind {
        self.kind
    }

    /// Whether the last notification says that the kernel did not copy. Only then does a
    /// measurement show the cost of zero copy, or the cost of a copy on the same kind of device.
    pub(super) fn sends_in_place(&self) -> bool {
        self.in_place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> Policy {
        Policy::new(SocketKind::Tcp4, SendBackend::Uring, Threshold::Bytes(1000))
    }

    #[test]
    fn sends_from_the_threshold_on_go_in_place() {
        let mut policy = policy();
        assert_eq!(policy.mode(Copying::Auto, 999, false), SendMode::Copy);
        assert_eq!(policy.mode(Copying::Auto, 1000, false), SendMode::ZeroCopy);
        assert_eq!(policy.mode(Copying::Never, 1, false), SendMode::ZeroCopy);
        assert_eq!(policy.mode(Copying::Always, 1 << 20, true), SendMode::Copy);
    }

    #[test]
    fn zero_copy_is_switched_off_when_the_kernel_copies() {
        let mut policy = policy();
        for _ in 0..MAX_COPIED {
            assert_eq!(policy.mode(Copying::Auto, 5000, false), SendMode::ZeroCopy);
            policy.notified(true);
        }
        assert_eq!(policy.off(), Some(OffReason::CopiedByKernel));
        let mut tried = Vec::new();
        for send in 0..8 * FIRST_PAUSE {
            if policy.mode(Copying::Auto, 5000, false) == SendMode::ZeroCopy {
                tried.push(send);
                policy.notified(true);
            }
        }
        // After 1024 sends, after 2048 more, after 4096 more.
        assert_eq!(tried, [1023, 3071, 7167]);
        // A send that must not be copied is not.
        assert_eq!(policy.mode(Copying::Never, 5000, false), SendMode::ZeroCopy);
    }

    #[test]
    fn one_send_in_place_switches_zero_copy_on_again() {
        let mut policy = policy();
        for _ in 0..MAX_COPIED {
            policy.notified(true);
        }
        while policy.mode(Copying::Auto, 5000, false) == SendMode::Copy {}
        policy.notified(false);
        assert!((0..10_000).all(|_| policy.mode(Copying::Auto, 5000, false) == SendMode::ZeroCopy));
    }

    #[test]
    fn sends_of_one_submission_have_one_mode() {
        // A kind that no other test sends over.
        let mut policy = Policy::new(SocketKind::Packet, SendBackend::Uring, Threshold::Measured);
        let mut modes = Vec::new();
        for _ in 0..100 {
            let together: Vec<_> = (0..48)
                .map(|_| policy.mode(Copying::Auto, 5000, false))
                .collect();
            assert_eq!(together, [together[0]; 48]);
            modes.push(together[0]);
            policy.submitted();
        }
        let copies = modes.iter().filter(|&&mode| mode == SendMode::Copy).count();
        assert!((40..=60).contains(&copies), "{copies}");
    }

    #[test]
    fn every_class_is_informed_of_its_sends() {
        // A kind that no other test sends over.
        let mut policy = Policy::new(SocketKind::Raw, SendBackend::Uring, Threshold::Measured);
        let since =
            |len| calibration::since(Class::of(SocketKind::Raw, SendBackend::Uring, false, len));
        let mut ask = |times| {
            for _ in 0..times {
                for len in [100, 50_000] {
                    policy.mode(Copying::Auto, len, false);
                    policy.submitted();
                }
            }
        };
        // Until both classes are decided without a measurement.
        ask(1 << 15);
        ask(REPORT_INTERVAL * 10 + 1);
        for len in [100, 50_000] {
            let told = since(len) / REPORT_INTERVAL;
            assert!((9..=11).contains(&told), "{len}: {told}");
        }
    }

    #[test]
    fn a_disabled_policy_always_copies() {
        let mut policy = policy();
        policy.disable();
        assert_eq!(policy.mode(Copying::Never, 5000, false), SendMode::Copy);
    }
}
