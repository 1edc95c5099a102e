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
        self.feedback.reported(copied);
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
mod tests {
    use super::*;

    fn policy() -> Policy {
        Policy::new(SendBackend::Uring, 1000)
    }

    #[test]
    fn sends_from_the_threshold_on_go_in_place() {
        let mut policy = policy();
        let short = Some(CopyReason::Short);
        assert_eq!(policy.copy_reason(Copying::Auto, 999), short);
        assert_eq!(policy.copy_reason(Copying::Auto, 1000), None);
        assert_eq!(policy.copy_reason(Copying::Never, 1), None);
        assert_eq!(policy.copy_reason(Copying::Never, 0), short);
        let reason = policy.copy_reason(Copying::Always, 1 << 20);
        assert_eq!(reason, Some(CopyReason::Request));
    }

    #[test]
    fn zero_copy_is_off_for_a_mib_when_the_kernel_copies() {
        let mut policy = policy();
        for _ in 0..16 {
            assert_eq!(policy.copy_reason(Copying::Auto, 1 << 16), None);
            policy.notified(true);
        }
        for _ in 0..16 {
            assert_eq!(policy.off(), Some(OffReason::CopiedByKernel));
            // A send that must not be copied is not.
            assert_eq!(policy.copy_reason(Copying::Never, 5000), None);
            let reason = policy.copy_reason(Copying::Auto, 1 << 16);
            assert_eq!(reason, Some(CopyReason::Off));
        }
        assert_eq!(policy.off(), None);
        assert_eq!(policy.copy_reason(Copying::Auto, 1 << 16), None);
    }

    #[test]
    fn a_disabled_policy_always_copies() {
        let mut policy = policy();
        policy.disable();
        let reason = policy.copy_reason(Copying::Never, 5000);
        assert_eq!(reason, Some(CopyReason::Off));
    }
}
