//! What the daemon counts. Each worker adds to counters of its own, once per turn; whoever asks
//! gets their sum.

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
        }

        /// One worker's counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
        }

        impl Counters {
            pub(crate) fn add_to(&self, sum: &mut Stats) {
                $(sum.$name += self.$name.0.load(Ordering::Relaxed);)*
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
    /// Connections reset because too many bytes were waiting for their receiver.
    overflow_resets,
    /// Devices lost because their memory or their rings went away.
    devices_lost,
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
}
