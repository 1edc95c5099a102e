//! The capabilities that set-up needs, and dropping them.

use std::io;

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

/// What set-up needs, from Linux 5.8 on.
const NEEDED: [(CapabilitySet, &str); 2] = [
    (CapabilitySet::BPF, "CAP_BPF"),
    (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN"),
];

/// Takes CAP_BPF and CAP_NET_ADMIN from the calling thread, and CAP_SYS_ADMIN, which stands for them on
/// all kernels. They cannot be regained except by running another program.
///
/// Capabilities belong to threads: call it before other threads are started, which then have none
/// either, or in each thread.
///
/// # Errors
/// Errors of capset(2).
pub fn drop_bpf_capabilities() -> io::Result<()> {
    let dropped = CapabilitySet::BPF | CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
    let mut sets = capabilities(None)?;
    sets.effective -= dropped;
    sets.permitted -= dropped;
    sets.inheritable -= dropped;
    Ok(set_capabilities(None, sets)?)
}

/// Names of the needed capabilities that the calling thread does not have.
pub(super) fn missing(release: (u32, u32)) -> Vec<&'static str> {
    let Ok(sets) = capabilities(None) else {
        return Vec::new();
    };
    missing_of(sets.effective, release)
}

fn missing_of(effective: CapabilitySet, release: (u32, u32)) -> Vec<&'static str> {
    let administrator = effective.contains(CapabilitySet::SYS_ADMIN);
    if release < (5, 8) {
        // These kernels know no CAP_BPF.
        let needed = [(administrator, "CAP_SYS_ADMIN")];
        let network = effective.contains(CapabilitySet::NET_ADMIN);
        let needed = needed.into_iter().chain([(network, "CAP_NET_ADMIN")]);
        return needed
            .filter(|(has, _)| !has)
            .map(|(_, name)| name)
            .collect();
    }
    let has = |capability| administrator || effective.contains(capability);
    let needed = NEEDED.iter().filter(|(capability, _)| !has(*capability));
    needed.map(|(_, name)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_have_names() {
        let none = CapabilitySet::empty();
        assert_eq!(missing_of(none, (6, 1)), ["CAP_BPF", "CAP_NET_ADMIN"]);
        assert_eq!(missing_of(CapabilitySet::BPF, (6, 1)), ["CAP_NET_ADMIN"]);
        assert_eq!(missing_of(CapabilitySet::NET_ADMIN, (6, 1)), ["CAP_BPF"]);
        assert!(missing_of(CapabilitySet::SYS_ADMIN, (6, 1)).is_empty());
        assert_eq!(
            missing_of(CapabilitySet::BPF | CapabilitySet::NET_ADMIN, (5, 4)),
            ["CAP_SYS_ADMIN"]
        );
    }

    #[test]
    fn dropped_capabilities_are_gone_in_this_thread_only() {
        let before = capabilities(None).unwrap();
        let after = std::thread::spawn(|| {
            drop_bpf_capabilities().unwrap();
            capabilities(None).unwrap()
        });
        let after = after.join().unwrap();
        let dropped = CapabilitySet::BPF | CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
        assert_eq!(after.effective, before.effective - dropped);
        assert_eq!(after.permitted, before.permitted - dropped);
        assert_eq!(capabilities(None).unwrap(), before);
    }
}
