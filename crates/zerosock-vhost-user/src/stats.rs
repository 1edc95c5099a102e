//! Counters of the control thread, by VM.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A fault of a front-end. Each is counted; none affects more than the connection it occurred on.
///
/// ```
/// use zerosock_vhost_user::FrontendFault;
///
/// let names: Vec<&str> = FrontendFault::ALL.iter().map(|fault| fault.name()).collect();
/// assert!(names.contains(&FrontendFault::Unsealed.name()));
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
#[repr(usize)]
pub enum FrontendFault {
    /// A header with another protocol version, or with the reply flag. Closes the connection.
    Header,
    /// A payload longer than the protocol allows. Closes the connection.
    PayloadTooLong,
    /// More descriptors than any message may carry. Closes the connection.
    TooManyDescriptors,
    /// The connection ended, or failed, in the middle of a message.
    Truncated,
    /// A request that is unknown, or needs a feature that was not offered or negotiated. Refused.
    Unsupported,
    /// A payload of the wrong length, or with a value out of range. Refused.
    Payload,
    /// Too many or too few descriptors for the request, or of the wrong kind. Refused.
    Descriptors,
    /// A request out of order: it changes a running queue, or starts one before its size and
    /// addresses are set. Refused.
    Order,
    /// Memory that cannot be mapped. Refused.
    Memory,
    /// The worker refused the command.
    Worker,
    /// A second front-end connected while the first is connected. The second is closed.
    Busy,
    /// No message for ten seconds while another front-end waited, or a reply not read for ten
    /// seconds. Closes the connection.
    Silent,
    /// Memory without F_SEAL_SHRINK where the seal is required. Refused.
    Unsealed,
    /// Too many descriptors of the front-end wait to be closed. Closes the connection.
    UnclosedDescriptors,
}

impl FrontendFault {
    /// All kinds, in the order of their discriminants.
    pub const ALL: [FrontendFault; 14] = [
        FrontendFault::Header,
        FrontendFault::PayloadTooLong,
        FrontendFault::TooManyDescriptors,
        FrontendFault::Truncated,
        FrontendFault::Unsupported,
        FrontendFault::Payload,
        FrontendFault::Descriptors,
        FrontendFault::Order,
        FrontendFault::Memory,
        FrontendFault::Worker,
        FrontendFault::Busy,
        FrontendFault::Silent,
        FrontendFault::Unsealed,
        FrontendFault::UnclosedDescriptors,
    ];

    /// A name for logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            FrontendFault::Header => "header",
            FrontendFault::PayloadTooLong => "payload_too_long",
            FrontendFault::TooManyDescriptors => "too_many_descriptors",
            FrontendFault::Truncated => "truncated",
            FrontendFault::Unsupported => "unsupported",
            FrontendFault::Payload => "payload",
            FrontendFault::Descriptors => "descriptors",
            FrontendFault::Order => "order",
            FrontendFault::Memory => "memory",
            FrontendFault::Worker => "worker",
            FrontendFault::Busy => "busy",
            FrontendFault::Silent => "silent",
            FrontendFault::Unsealed => "unsealed",
            FrontendFault::UnclosedDescriptors => "unclosed_descriptors",
        }
    }
}

/// Events on one VM's control socket since the start.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct ControlStats {
    /// Front-ends that connected.
    pub connections: u64,
    /// Complete messages received.
    pub messages: u64,
    faults: [u64; FrontendFault::ALL.len()],
}

impl ControlStats {
    /// How often a kind of fault occurred.
    pub fn faults(&self, fault: FrontendFault) -> u64 {
        self.faults[fault as usize]
    }
}

/// A live view of the faults of several front-ends.
#[derive(Clone, Debug)]
pub struct FaultCounts(Vec<Arc<Counters>>);

impl FaultCounts {
    pub(super) fn new(counters: Vec<Arc<Counters>>) -> FaultCounts {
        FaultCounts(counters)
    }

    /// How often a kind of fault has occurred.
    pub fn of(&self, fault: FrontendFault) -> u64 {
        self.0.iter().map(|one| one.snapshot().faults(fault)).sum()
    }
}

/// The counters behind [`ControlStats`]: written by the control thread, read by any thread.
#[derive(Debug, Default)]
pub(super) struct Counters {
    connections: AtomicU64,
    messages: AtomicU64,
    faults: [AtomicU64; FrontendFault::ALL.len()],
}

impl Counters {
    pub(super) fn connection(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn message(&self) {
        self.messages.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn fault(&self, fault: FrontendFault) {
        self.faults[fault as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> ControlStats {
        ControlStats {
            connections: self.connections.load(Ordering::Relaxed),
            messages: self.messages.load(Ordering::Relaxed),
            faults: std::array::from_fn(|i| self.faults[i].load(Ordering::Relaxed)),
        }
    }
}
