//! Unit tests of `shares`.

use super::*;

fn of(limit: u64, host_sockets: bool, max_connections: Option<usize>) -> Shares {
    let wanted = Wanted {
        memory: MemoryLimits::default(),
        vms: 3,
        users: 1,
        host_sockets,
        max_connections,
    };
    shares(limit, &wanted)
}

#[test]
fn the_cap_on_connections_fits_the_descriptors_that_one_peer_can_have() {
    let shares = of(fixed(3) + LEAST_MESSAGES + 1000, true, None);
    assert_eq!(shares.reserved, fixed(3) + LEAST_MESSAGES);
    let Shares {
        peers,
        guaranteed,
        common,
        max_connections,
        ..
    } = shares;
    assert_eq!((peers, guaranteed, common), (4, 125, 500));
    assert_eq!(max_connections, 625);
    // No descriptors are needed, or the number is configured.
    assert_eq!(of(1024, false, None).max_connections, 131_072);
    assert_eq!(of(1024, true, Some(7)).max_connections, 7);
    // Clamped to the bounds.
    assert_eq!(of(1 << 30, true, None).max_connections, 131_072);
    assert_eq!(of(64, true, None).max_connections, 64);
}

#[test]
fn the_minimum_guarantees_each_peer_the_descriptors_of_a_front_end() {
    for (vms, users) in [(1, 0), (2, 1), (100, 0), (100, 1000), (10_000, 3)] {
        let wanted = Wanted {
            memory: MemoryLimits::default(),
            vms,
            users,
            host_sockets: true,
            max_connections: None,
        };
        let minimum = shares(0, &wanted).minimum;
        let enough = |limit| {
            let shares = shares(limit, &wanted);
            shares.guaranteed >= LEAST_GUARANTEED
                && shares.reserved >= fixed(vms as u64) + LEAST_MESSAGES
        };
        assert!(enough(minimum), "{vms} {users}: {minimum}");
        assert!(!enough(minimum - 1), "{vms} {users}: {minimum}");
    }
    let wanted = of(1 << 20, true, None);
    // A message of each peer and one more.
    assert_eq!(wanted.reserved, fixed(3) + 5 * fd_passing::RESERVE);
}

#[test]
fn the_shares_are_those_of_the_budget() {
    let wanted = Wanted {
        memory: MemoryLimits::default(),
        vms: 5,
        users: 2,
        host_sockets: true,
        max_connections: None,
    };
    let (budget, shares) = budget(wanted);
    assert_eq!(budget.share(), shares.guaranteed);
    assert_eq!(
        budget.limits().descriptors,
        shares.guaranteed * shares.peers + shares.common
    );
}
