//! The rings of the device.

use zerosock_virtio::queues::Rings;
use zerosock_virtio::ring::Ring;

/// The rings: those of the queue pairs, receive before transmit, and the control queue.
#[derive(Debug, Default)]
pub struct NetRings(pub(super) Vec<Option<Ring>>);

impl Rings for NetRings {
    fn slot(&mut self, index: u16) -> Option<&mut Option<Ring>> {
        self.0.get_mut(usize::from(index))
    }

    fn slots(&mut self) -> impl Iterator<Item = &mut Option<Ring>> {
        self.0.iter_mut()
    }
}

impl NetRings {
    pub(super) fn new(pairs: u16) -> NetRings {
        let mut rings = Vec::new();
        rings.resize_with(2 * usize::from(pairs) + 1, || None);
        NetRings(rings)
    }

    pub(super) fn ring(&mut self, index: usize) -> Option<&mut Ring> {
        self.0.get_mut(index)?.as_mut()
    }

    /// A ring that the device may process.
    pub(super) fn live(&mut self, index: usize) -> Option<&mut Ring> {
        self.ring(index).filter(|ring| ring.live())
    }
}
