//! Unit tests of `policy`.

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
