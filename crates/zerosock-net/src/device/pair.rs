//! A queue pair of the device.

use zerosock_proto::Instant;

use super::receive::Receiver;
use super::rings::NetRings;
use super::terms::{BURSTS, BYTES, Fatal, Terms};
use super::transmit::Transmitter;
use crate::backend::Backend;
use crate::stats::NetStats;

/// One queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    pub(super) receiver: Receiver,
    pub(super) transmitter: Transmitter,
    /// The back-end knows that the driver uses the pair.
    pub(super) active: bool,
    /// The back-end's descriptor is polled for room.
    pub(super) polls_room: bool,
}

impl QueuePair {
    pub(super) fn new() -> QueuePair {
        QueuePair {
            receiver: Receiver::new(),
            transmitter: Transmitter::default(),
            active: false,
            polls_room: false,
        }
    }

    /// Moves frames within the budget of a turn, in bursts of both directions by turns: a driver that polls
    /// works on one burst while the device works on the next. Returns whether there may be more.
    pub(super) fn move_frames(
        &mut self,
        rings: &mut NetRings,
        (backend, index): (&mut impl Backend, usize),
        terms: &Terms,
        tally: &mut NetStats,
        now: Instant,
    ) -> Result<bool, Fatal> {
        let ends = (tally.tx_bytes + BYTES, tally.rx_bytes + BYTES);
        // What a back-end that posts chains has got is not with it before the end of the turn.
        let publishes = !backend.posts();
        let mut more = false;
        for _ in 0..BURSTS {
            more = false;
            let sent = tally.tx_frames;
            if let Some(ring) = rings.live(2 * index + 1) {
                let backend = (&mut *backend, index);
                more |= self
                    .transmitter
                    .run(ring, backend, terms, (tally, ends.0), now)?;
                if publishes {
                    ring.queue.publish_without_notify();
                }
            }
            // One interrupt for what was sent and for its answer.
            if tally.tx_frames > sent && backend.may_have_answers() {
                self.receiver.readable.set();
            }
            if let Some(ring) = rings.live(2 * index) {
                let backend = (&mut *backend, index);
                more |= self
                    .receiver
                    .run(ring, backend, terms, (tally, ends.1), now)?;
                if publishes {
                    ring.queue.publish_without_notify();
                }
            }
            if !more {
                break;
            }
        }
        Ok(more)
    }
}
