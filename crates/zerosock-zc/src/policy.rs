//! Decides whether a send is copied.
//!
//! A send without a copy has costs of its own: pages are pinned, and a notification is posted and
//! read. So short sends are copied ([`SocketKind::zero_copy_threshold`](crate::SocketKind)), and
//! all sends while the kernel copies them after all ([`CopyFeedback`]).

use super::SendBackend;
use super::copy_feedback::CopyFeedback;
use super::message::Copying;
use super::stats::{CopyReason, OffReason};

pub(super) struct Policy {
    /// The length from which on a buffer is sent in place, in bytes.
    pub(super) threshold: usize,
    /// Why the kernel never sends from this socket without a copy.
    disabled: Option<OffReason>,
    feedback: CopyFeedback,
}

impl Policy {
    pub(super) fn new(backend: SendBackend, threshold: usize) -> Self {
        Self {
            threshold,
            disabled: (backend == SendBackend::Copy).then_some(OffReason::BackendCopies),
            feedback: CopyFeedback::beginning_in_place(),
        }
    }

    /// Why a send of `len` bytes is copied; none if it goes without a copy.
    pub(super) fn copy_reason(&mut self, wish: Copying, len: usize) -> Option<CopyReason> {
        match wish {
            Copying::Always => Some(CopyReason::Request),
            _ if self.disabled.is_some() => Some(CopyReason::Off),
            _ if len == 0 => Some(CopyReason::Short),
            Copying::Never => None,
            Copying::Auto if self.feedback.is_paused() => {
                self.feedback.copied(len);
                Some(CopyReason::Off)
            }
            Copying::Auto => (len < self.threshold).then_some(CopyReason::Short),
        }
    }

    /// Takes note of a notification, which says whether the kernel copied.
    pub(super) fn notified(&mut self, copied: bool) {
        self.feedback.reported(1, copied);
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
        let paused = self.feedback.is_paused();
        self.disabled
            .or(paused.then_some(OffReason::CopiedByKernel))
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
