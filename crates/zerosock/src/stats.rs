//! Counters of the daemon. Each worker adds to counters of its own once per turn; a reader gets
//! their sum.
//!
//! Most counters count events. Those named `now` are gauges: they return to their earlier value
//! when everything that was added is removed.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use zerosock_proto::vsock::ConnectError;

macro_rules! counters {
    (
        workers { $($(#[$doc:meta])* $name:ident,)* }
        others { $($(#[$other_doc:meta])* $other:ident,)* }
    ) => {
        /// The sum over all workers, taken while they run.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            $($(#[$other_doc])* pub $other: u64,)*
        }

        /// The counters that are not zero, as `name=value`, on one line.
        impl fmt::Display for Stats {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let counters = [
                    $((stringify!($name), self.$name),)*
                    $((stringify!($other), self.$other),)*
                ];
                let mut separator = "";
                for (name, value) in counters.iter().filter(|(_, value)| *value != 0) {
                    write!(f, "{separator}{name}={value}")?;
                    separator = " ";
                }
                Ok(())
            }
        }

        /// The counters of one worker.
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
    workers {
        /// Payload bytes that the kernel read from or wrote into guest memory directly, or that were
        /// copied once from guest to guest.
        in_place_bytes,
        /// Those that were sent to TCP sockets with MSG_ZEROCOPY. The kernel may have copied some of them
        /// after all, for instance to a target on the same machine.
        zero_copy_bytes,
        /// Payload bytes that were copied into a buffer of the device because their receiver stalled.
        copied_bytes,
        /// Payload bytes from guests.
        rx_bytes,
        /// Payload bytes to guests.
        tx_bytes,
        /// Packets from guests.
        rx_packets,
        /// Packets to guests.
        tx_packets,
        /// Packets that no correct guest sends: malformed, from another source, beyond credit.
        bad_packets,
        /// Descriptor chains that were malformed or too short.
        bad_chains,
        /// Connections established.
        conns_added,
        /// Connections ended.
        conns_removed,
        /// Connections refused: the sum of the next seven.
        conns_refused,
        /// Those that a configuration denies: a rule of the access list (which counts them by rule:
        /// [`AccessList::denied`](crate::access::AccessList::denied)), no group in common, or a port that a
        /// process has not named.
        refused_denied,
        /// Those to the host side for which no program listens: the host socket or the target of a rule
        /// does not exist, or nothing listens there.
        refused_no_listener,
        /// Those to the host side for which the backlog of the listener stayed full.
        refused_backlog_full,
        /// Those whose target does not answer in time or cannot be reached: a silent TCP target (a full backlog
        /// of TCP looks so, too), no route to it, a guest that does not answer or has no running driver, a
        /// CID that no endpoint has.
        refused_unreachable,
        /// Those that a guest or an attached process refused: nothing listens on the port there, or the
        /// backlog is full.
        refused_by_endpoint,
        /// Those beyond a limit: of a rule, of a VM's share of descriptors, of requests without an answer.
        refused_by_limit,
        /// Others: a name that does not resolve, an address that a policy denies, a caller that gave up.
        refused_other,
        /// Kicks from guests.
        kicks,
        /// Handshakes of host programs that were closed: time-out, or no CONNECT line.
        bad_handshakes,
        /// Connects, in either direction, that were retried because the listener's backlog was full.
        connect_retries,
        /// Ended connections that were dropped because the host program did not read the last bytes in
        /// time.
        linger_timeouts,
        /// Connections reset because too many bytes waited for their receiver.
        overflow_resets,
        /// Connections reset and devices lost because memory could not be allocated.
        no_memory,
        /// Connections reset because a message was longer than its receiver accepts.
        message_resets,
        /// Datagrams from guests that were dropped: fragments were missing or the datagram was too
        /// long; the destination does not exist, is not allowed, or does not accept datagrams; or too
        /// many bytes waited for the receiver. Also those that sockets of rules did not take, and answers
        /// of such sockets that are too long for the guest. Datagrams dropped at a socket of the embedding
        /// program are counted there.
        datagrams_dropped,
        /// Devices lost because their memory vanished or their rings broke, one for each device however
        /// many queue pairs it has.
        devices_lost,
        /// Connections that exist now, including those being established, and ended ones that the
        /// guest has not been told of yet.
        connections_now,
        /// Bridges that exist now: host sockets and siblings, including sockets that still take the
        /// last bytes of an ended connection.
        bridges_now,
        /// Timers that run now.
        timers_now,
        /// Ports used now by connections that host programs and siblings have made: one for each
        /// connection, on whichever queue pair it is.
        ports_now,
    }
    others {
        /// Messages and descriptors of front-ends that were refused. The control thread also
        /// counts them by kind.
        control_faults,
        /// Attached processes, services not included.
        attached,
        /// Attached services of the host.
        services,
        /// Ports of the host that services have claimed.
        claimed_ports,
        /// Requests to attach that were refused.
        attach_refused,
        /// Guest endpoints that exist now.
        guest_endpoints,
        /// Guest endpoints that were accepted.
        guest_registered,
        /// Requests for guest endpoints with a page that has not shown its value.
        guest_page_failures,
        /// Requests for guest endpoints, and streams for them, that were refused. The log has the reasons.
        guest_refused,
        /// Descriptors of peers that were refused and closed: of a kind that no request
        /// accepts, or beyond the peer's [share](crate::daemon::Shares). Includes connections
        /// of host programs beyond the share.
        descriptors_refused,
        /// System calls on objects of peers (close, munmap) that the reaper of this process has
        /// finished.
        reaper_finished,
        /// Those that took long while others waited: a peer can delay them.
        reaper_stuck,
        /// Reaper threads that exist now.
        reaper_threads,
        /// Calls that wait or run now.
        reaper_pending,
        /// Age of the oldest running call in milliseconds.
        reaper_longest_ms,
    }
}

/// Why a connection is refused, as the counters distinguish it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum RefusalCause {
    /// A rule of the access list, the groups, or the ports that a process has named.
    Denied,
    /// The host socket or target does not exist, or nothing listens there.
    NoListener,
    /// The backlog of the listener stayed full.
    BacklogFull,
    /// No answer in time, or no way to the target.
    Unreachable,
    /// A guest or process refused.
    Endpoint,
    /// A limit.
    Limit,
    Other,
}

impl RefusalCause {
    /// The cause that an error of connecting means.
    pub(crate) fn of(error: &io::Error) -> RefusalCause {
        use io::ErrorKind;
        match error.kind() {
            ErrorKind::ConnectionRefused | ErrorKind::NotFound => RefusalCause::NoListener,
            ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => {
                RefusalCause::Unreachable
            }
            _ => RefusalCause::Other,
        }
    }
}

impl From<ConnectError> for RefusalCause {
    /// Why the protocol core makes no request.
    fn from(error: ConnectError) -> RefusalCause {
        match error {
            ConnectError::InUse | ConnectError::TooManyConnections => RefusalCause::Limit,
            ConnectError::Unreachable => RefusalCause::Unreachable,
            ConnectError::LocalCid | ConnectError::SocketType => RefusalCause::Other,
        }
    }
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

    #[inline]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Replaces the contribution `before` of a device to a gauge by `now`.
    pub(crate) fn replace(&self, before: usize, now: usize) {
        // Wraps on the way down, as the sum does.
        self.add((now as u64).wrapping_sub(before as u64));
    }
}

/// Contributions of a device to the gauges, as last counted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Gauges {
    pub(crate) connections: usize,
    pub(crate) bridges: usize,
    pub(crate) timers: usize,
    pub(crate) ports: usize,
}

impl Counters {
    /// Counts a refused connection.
    pub(crate) fn refuse(&self, cause: RefusalCause) {
        self.conns_refused.add(1);
        let counter = match cause {
            RefusalCause::Denied => &self.refused_denied,
            RefusalCause::NoListener => &self.refused_no_listener,
            RefusalCause::BacklogFull => &self.refused_backlog_full,
            RefusalCause::Unreachable => &self.refused_unreachable,
            RefusalCause::Endpoint => &self.refused_by_endpoint,
            RefusalCause::Limit => &self.refused_by_limit,
            RefusalCause::Other => &self.refused_other,
        };
        counter.add(1);
    }

    pub(crate) fn replace_gauges(&self, before: Gauges, now: Gauges) {
        self.connections_now
            .replace(before.connections, now.connections);
        self.bridges_now.replace(before.bridges, now.bridges);
        self.timers_now.replace(before.timers, now.timers);
        self.ports_now.replace(before.ports, now.ports);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_displayed_on_one_line() {
        let stats = Stats {
            rx_bytes: 7,
            attached: 1,
            ..Stats::default()
        };
        assert_eq!(stats.to_string(), "rx_bytes=7 attached=1");
        assert_eq!(Stats::default().to_string(), "");
    }

    #[test]
    fn gauges_return_to_zero_when_contributions_are_removed() {
        let workers = [Counters::default(), Counters::default()];
        let none = Gauges::default();
        let some = |connections| Gauges {
            connections,
            ..none
        };
        workers[0].replace_gauges(none, some(5));
        workers[1].replace_gauges(none, some(7));
        workers[0].replace_gauges(some(5), some(1));
        let sum = || {
            let mut sum = Stats::default();
            workers.iter().for_each(|worker| worker.add_to(&mut sum));
            sum.connections_now
        };
        assert_eq!(sum(), 8);
        workers[0].replace_gauges(some(1), none);
        workers[1].replace_gauges(some(7), none);
        assert_eq!(sum(), 0);
    }
}
