//! The counters of a device: its worker adds to them once in each turn.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The values at one time.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        pub struct NetStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The counters that are not zero, as `name=value`, on one line.
        impl fmt::Display for NetStats {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut separator = "";
                $(if self.$name != 0 {
                    write!(f, "{separator}{}={}", stringify!($name), self.$name)?;
                    separator = " ";
                })*
                let _ = separator;
                Ok(())
            }
        }

        /// The counters.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($name: AtomicU64,)*
        }

        impl Counters {
            /// The values now. Those of a turn that runs are not all in.
            pub fn get(&self) -> NetStats {
                NetStats {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                }
            }

            /// Adds the events of a turn.
            pub(crate) fn add(&self, turn: NetStats) {
                $(if turn.$name != 0 {
                    self.$name.fetch_add(turn.$name, Ordering::Relaxed);
                })*
            }
        }
    };
}

counters! {
    /// Frames that the guest has received.
    rx_frames,
    /// Their bytes, without headers of virtio.
    rx_bytes,
    /// Those bytes of them that were copied here: see [`device`](crate::device).
    rx_copied,
    /// Frames to the guest that were dropped because they did not fit into its buffers.
    rx_no_room,
    /// Frames to the guest that were dropped because they needed an offload that its driver did not
    /// accept, or because their queue stopped.
    rx_dropped,
    /// Frames for the guest that were too long for its back-end, and were left to the stack of the kernel or
    /// dropped, by choice. Only AF_XDP has such frames.
    rx_long,
    /// Frames to the guest that the kernel has dropped at the socket: it had no chunk for them, or they were too
    /// long. This and the next three are counters of AF_XDP sockets (XDP_STATISTICS).
    rx_kernel_dropped,
    /// Frames to the guest that the kernel has dropped because the receive ring was full.
    rx_ring_full,
    /// How often the kernel wanted a chunk for a frame to the guest and there was none.
    rx_fill_empty,
    /// Frames that the guest has sent.
    tx_frames,
    /// Their bytes, without headers of virtio.
    tx_bytes,
    /// Those bytes of them that were copied here: by AF_XDP, and frames that waited at the uplink of a switch.
    tx_copied,
    /// Frames of the guest that were dropped because their header lied.
    tx_bad_header,
    /// Frames of the guest that were shorter than an Ethernet header.
    tx_runt,
    /// Frames of the guest beyond the MTU that was negotiated, or of too many bytes or pieces.
    tx_too_long,
    /// Frames of the guest with a source address that it may not use.
    tx_spoofed,
    /// Frames of the guest that the back-end refused.
    tx_refused,
    /// Frames of the guest that were dropped because the link was down.
    tx_link_down,
    /// Descriptors of frames of the guest that the kernel has refused, only with AF_XDP.
    tx_invalid,
    /// RARP broadcasts that the front-end has asked for.
    announcements,
    /// Descriptor chains that were malformed or too short.
    bad_chains,
    /// Control commands that were not known.
    control_refused,
    /// How often the guest was notified.
    notifications,
}
