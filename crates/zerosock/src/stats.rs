//! What the daemon counts. Each worker adds to counters of its own, once per turn; whoever asks
//! gets their sum.
//!
//! Most count what has happened. Those that say `now` count what there is: they go down as well,
//! and all of them are where they were before when what came has gone.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A sum over all workers, taken while they run.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            /// Messages and descriptors of front-ends that were refused; the control plane's own
            /// counters tell them apart.
            pub control_faults: u64,
            /// Processes that are attached now.
            pub attached: u64,
            /// Host services that are attached now.
            pub services: u64,
            /// Ports of the host that they have claimed.
            pub claimed_ports: u64,
            /// Requests to attach that were refused.
            pub attach_refused: u64,
            /// Descriptors of peers that were refused, each of them closed: of no use, or beyond the
            /// peer's [share](crate::daemon::Shares). Connections of host programs beyond it count
            /// here too.
            pub descriptors_refused: u64,
            /// System calls on objects of peers (close, munmap) that the reaper threads of this
            /// process have finished.
            pub reaper_finished: u64,
            /// Those that took long, while others waited: a peer can hold them up.
            pub reaper_stuck: u64,
            /// Descriptors and memory given up for good, because too many waited.
            pub reaper_leaked: u64,
            /// Reaper threads now.
            pub reaper_threads: u64,
            /// Calls that wait or are under way now.
            pub reaper_pending: u64,
            /// For how many milliseconds the oldest call has been under way.
            pub reaper_longest_ms: u64,
        }

        /// One worker's counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
        }

        impl Counters {
            pub(crate) fn add_to(&self, sum: &mut Stats) {
                $(sum.$name = sum.$name.wrapping_add(self.$name.0.load(Ordering::Relaxed));)*
            }
        }
    };
}

counters! {
    /// Payload bytes that the kernel read from or wrote into guest memory itself, or that went
    /// from guest to guest by one copy.
    in_place_bytes,
    /// Payload bytes that passed through a buffer of ours because their receiver had stalled.
    copied_bytes,
    /// Payload bytes from guests.
    rx_bytes,
    /// Payload bytes to guests.
    tx_bytes,
    /// Packets from guests.
    rx_packets,
    /// Packets to guests.
    tx_packets,
    /// Packets that were no valid vsock packets, or not the guest's to send.
    bad_packets,
    /// Descriptor chains that could not be used.
    bad_chains,
    /// Connections joined.
    conns_added,
    /// Connections that have ended.
    conns_removed,
    /// Connections refused, by either side or by a limit.
    conns_refused,
    /// Kicks from guests.
    kicks,
    /// Calls for which a host program's handshake was closed: time-out or no CONNECT line.
    bad_handshakes,
    /// Connects to host sockets that were tried again because the listener's backlog was full.
    connect_retries,
    /// Ended connections that were dropped because the host program took none of the last bytes for
    /// too long.
    linger_timeouts,
    /// Connections reset because too many bytes were waiting for their receiver.
    overflow_resets,
    /// Connections reset, and devices lost, because there was no memory for what they need.
    no_memory,
    /// Connections reset because a message was longer than its receiver can take.
    message_resets,
    /// Datagrams from guests that were dropped: some of their fragments were missing, or they were
    /// too long; there is nobody whom they are for, whom the guest may reach, and who takes
    /// datagrams; or too much waited for the receiver or was on its way. Those that came to a
    /// program's sockets are counted there.
    datagrams_dropped,
    /// Devices lost because their memory or their rings went away: one for each, however many queue
    /// pairs it has.
    devices_lost,
    /// Connections that exist now, those included that are being made, and those whose end a guest
    /// has not been told.
    connections_now,
    /// Other ends of connections that exist now: sockets, siblings, and sockets that still take
    /// the last bytes of a connection that has ended.
    joins_now,
    /// Timers that run now.
    timers_now,
    /// Ports of connections that host programs and siblings have made, now: one for each
    /// connection, at whichever queue pair it is.
    ports_now,
}

/// A counter with one writer.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. A plain load and store: only the owning worker writes.
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(
            self.0.load(Ordering::Relaxed).wrapping_add(n),
            Ordering::Relaxed,
        );
    }

    #[cfg(test)]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// What was counted here as `before` is `now`.
    pub(crate) fn moves(&self, before: usize, now: usize) {
        // Goes round on the way down, as the sum does.
        self.add((now as u64).wrapping_sub(before as u64));
    }
}

/// What a device has, as it was last counted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Holdings {
    pub(crate) connections: usize,
    pub(crate) bridges: usize,
    pub(crate) timers: usize,
    pub(crate) ports: usize,
}

impl Counters {
    pub(crate) fn hold(&self, before: Holdings, now: Holdings) {
        self.connections_now
            .moves(before.connections, now.connections);
        self.joins_now.moves(before.bridges, now.bridges);
        self.timers_now.moves(before.timers, now.timers);
        self.ports_now.moves(before.ports, now.ports);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_is_goes_down_as_well() {
        let workers = [Counters::default(), Counters::default()];
        let none = Holdings::default();
        let some = |connections| Holdings {
            connections,
            ..none
        };
        workers[0].hold(none, some(5));
        workers[1].hold(none, some(7));
        workers[0].hold(some(5), some(1));
        let sum = || {
            let mut sum = Stats::default();
            workers.iter().for_each(|worker| worker.add_to(&mut sum));
            sum.connections_now
        };
        assert_eq!(sum(), 8);
        workers[0].hold(some(1), none);
        workers[1].hold(some(7), none);
        assert_eq!(sum(), 0);
    }
}
