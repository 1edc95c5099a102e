//! The queues of a vsock device.

/// Index of the receive queue: buffers for packets to the guest (virtio 1.2, 5.10.2).
pub(crate) const RX: u16 = 0;

/// Index of the transmit queue: packets from the guest.
pub(crate) const TX: u16 = 1;

/// Index of the event queue.
pub(crate) const EVENT: u16 = 2;
