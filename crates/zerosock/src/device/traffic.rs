//! What one device has passed, for the reports of an operator.
//!
//! # Invariants
//! - A [`Traffic`] has one writer, the worker of its device. It grows by what the worker's counters grow
//!   during the calls of the device, so that the packet path counts each packet once.
//! - A [`TrafficBoard`] keeps no device alive: what a device has counted ends with it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use zerosock_proto::Cid;

use crate::stats::{Counter, Counters};

macro_rules! traffic {
    ($($(#[$doc:meta])* $name:ident: $counter:ident,)*) => {
        /// What the devices of one CID have counted since they exist: of a VM, of a process, or of all
        /// services of the host together.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        #[non_exhaustive]
        pub struct EndpointTraffic {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The counters of one device.
        #[derive(Debug, Default)]
        struct Counts {
            $($name: Counter,)*
        }

        impl EndpointTraffic {
            /// What a worker has counted for all its devices.
            fn of_worker(counters: &Counters) -> EndpointTraffic {
                EndpointTraffic { $($name: counters.$counter.get(),)* }
            }

            fn add(&mut self, counts: &Counts) {
                $(self.$name = self.$name.wrapping_add(counts.$name.get());)*
            }
        }

        impl Counts {
            /// Adds the growth of a worker's counters.
            fn add_growth(&self, before: EndpointTraffic, now: EndpointTraffic) {
                // Wraps where a gauge went down, as the gauges of a worker do.
                $(self.$name.add(now.$name.wrapping_sub(before.$name));)*
            }
        }
    };
}

traffic! {
    /// Connections established.
    connections: conns_added,
    /// Connections that exist now.
    connections_now: connections_now,
    /// Connections refused.
    refused: conns_refused,
    /// Payload bytes from the endpoint.
    rx_bytes: rx_bytes,
    /// Payload bytes to the endpoint.
    tx_bytes: tx_bytes,
    /// Those of both that were passed in place.
    in_place_bytes: in_place_bytes,
    /// Those that were copied because their receiver stalled.
    copied_bytes: copied_bytes,
    /// Packets that no correct driver sends.
    bad_packets: bad_packets,
    /// Datagrams from the endpoint that were dropped.
    datagrams_dropped: datagrams_dropped,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    counts: Arc<Counts>,
    /// The worker's counters at the start of the current call.
    before: EndpointTraffic,
}

impl Traffic {
    /// The worker calls the device.
    #[inline]
    pub(crate) fn begin(&mut self, counters: &Counters) {
        self.before = EndpointTraffic::of_worker(counters);
    }

    /// The call has ended.
    #[inline]
    pub(crate) fn end(&mut self, counters: &Counters) {
        let now = EndpointTraffic::of_worker(counters);
        if now != self.before {
            self.counts.add_growth(self.before, now);
        }
    }
}

/// The counters of all devices of a daemon, shared with the threads that report them.
#[derive(Clone, Debug, Default)]
pub(crate) struct TrafficBoard(Arc<Mutex<Vec<Entry>>>);

/// The counters of a device and its CID.
type Entry = (Cid, Weak<Counts>);

impl TrafficBoard {
    /// The counters of a new device.
    pub(crate) fn enter(&self, cid: Cid) -> Traffic {
        let traffic = Traffic::default();
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(_, counts)| counts.strong_count() > 0);
        all.push((cid, Arc::downgrade(&traffic.counts)));
        traffic
    }

    /// The sums of all devices that exist, by CID.
    pub(crate) fn sums(&self) -> BTreeMap<Cid, EndpointTraffic> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sums = BTreeMap::<Cid, EndpointTraffic>::new();
        for (cid, counts) in all.iter() {
            if let Some(counts) = counts.upgrade() {
                sums.entry(*cid).or_default().add(&counts);
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_counts_what_grew_during_its_calls_and_is_forgotten_with_its_device() {
        let worker = Counters::default();
        let board = TrafficBoard::default();
        let (a, b) = (Cid::new(3), Cid::new(4));
        let (mut first, mut second) = (board.enter(a), board.enter(b));
        let mut other_pair = board.enter(a);
        first.begin(&worker);
        worker.rx_bytes.add(100);
        worker.connections_now.replace(0, 3);
        first.end(&worker);
        second.begin(&worker);
        worker.tx_bytes.add(7);
        worker.connections_now.replace(0, 1);
        second.end(&worker);
        other_pair.begin(&worker);
        worker.rx_bytes.add(20);
        other_pair.end(&worker);
        first.begin(&worker);
        worker.connections_now.replace(3, 1);
        first.end(&worker);
        let sums = board.sums();
        assert_eq!((sums[&a].rx_bytes, sums[&a].tx_bytes), (120, 0));
        assert_eq!((sums[&b].rx_bytes, sums[&b].tx_bytes), (0, 7));
        assert_eq!((sums[&a].connections_now, sums[&b].connections_now), (1, 1));
        drop(second);
        assert!(!board.sums().contains_key(&b));
    }
}
