//! Unit tests of `pairs`.

use super::*;
use crate::addr::Cid;

#[test]
fn the_first_pair_has_the_standard_queues() {
    assert_eq!(QueuePairs::ONE.queues(), 3);
    let of = |index| QueuePairs::ONE.queue_use(index);
    assert_eq!(of(0), Some(QueueUse::Receive(0)));
    assert_eq!(of(1), Some(QueueUse::Transmit(0)));
    assert_eq!(of(2), Some(QueueUse::Events));
    assert_eq!(of(3), None);
    assert_eq!(of(u16::MAX), None);
}

#[test]
fn each_queue_has_one_use() {
    let most = QueuePairs::new(QueuePairs::MAX).unwrap();
    for pair in 0..most.get() {
        assert_eq!(
            most.queue_use(rx_queue(pair)),
            Some(QueueUse::Receive(pair))
        );
        assert_eq!(
            most.queue_use(tx_queue(pair)),
            Some(QueueUse::Transmit(pair))
        );
    }
    let used: std::collections::HashSet<_> = (0..most.queues())
        .map(|index| most.queue_use(index).unwrap())
        .collect();
    assert_eq!(used.len(), usize::from(most.queues()));
}

#[test]
fn one_to_sixteen_pairs_are_valid() {
    assert_eq!(QueuePairs::new(0), Err(BadPairs(0)));
    assert_eq!(QueuePairs::new(17), Err(BadPairs(17)));
    assert_eq!(QueuePairs::new(16).unwrap().get(), 16);
}

/// Examples of docs/queue-pairs.md, computed by another program from its text.
#[test]
fn flow_hash_matches_the_documented_examples() {
    let three = QueuePairs::new(3).unwrap();
    for (driver, cid, port, hash, pair) in EXAMPLES {
        let peer = Address::new(Cid::new(cid), Port::new(port));
        assert_eq!(
            flow_hash(Port::new(driver), peer),
            hash,
            "{driver} {peer:?}"
        );
        assert_eq!(three.of_flow(Port::new(driver), peer), pair);
    }
}

#[test]
fn consecutive_ports_are_spread_evenly() {
    let three = QueuePairs::new(3).unwrap();
    let mut counts = [0; 3];
    for port in 0..3000 {
        let peer = Address::new(Cid::HOST, Port::new(1024));
        counts[usize::from(three.of_flow(Port::new((1 << 30) + port), peer))] += 1;
    }
    assert!(
        counts.iter().all(|count| (850..=1150).contains(count)),
        "{counts:?}"
    );
}

/// Driver's port, peer's CID and port; hash, and pair of three.
const EXAMPLES: [(u32, u32, u32, u32, u16); 4] = [
    (1024, 2, 5000, 0x0aaf_2378, 0),
    (0x4000_0000, 2, 22, 0x660c_ffcf, 1),
    (0xffff_fffe, 2, 0, 0x48b7_7717, 0),
    (7, 3, 9, 0xdc5b_6deb, 2),
];
