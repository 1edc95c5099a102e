//! Feature bits of vsock devices (virtio 1.3, 5.10.3), without those of datagrams
//! ([`datagram`](super::datagram)).

/// VIRTIO_VSOCK_F_STREAM. Linux accepts no feature, which means streams.
pub const F_STREAM: u64 = 1 << 0;
/// VIRTIO_VSOCK_F_SEQPACKET.
pub const F_SEQPACKET: u64 = 1 << 1;
/// VIRTIO_VSOCK_F_ZS_PAIRS: several queue pairs (docs/queue-pairs.md). Offered by a device that has
/// more than one.
pub const F_PAIRS: u64 = 1 << 23;
