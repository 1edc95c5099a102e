//! Bytes in and out of a driver's connections.
//!
//! What must hold here: sent bytes are written once, into the buffer that the
//! device reads; received bytes are copied once, out of the buffer that the
//! device wrote. Credit goes back to the peer when bytes have left our hands,
//! not before.

use zerosock_proto::vsock::{CommitError, Reservation, ReserveError};

use super::Driver;
use super::errors::{DriverError, RecvError, SendError};
use super::stream::{Next, StreamId, StreamState};

/// Room in a transmit buffer that the device will read in place: fill it with
/// [`Driver::fill`], then [`Driver::commit`] or [`Driver::cancel`] it. Credit
/// for it is taken already.
#[derive(Debug)]
#[must_use = "a loan that is neither committed nor cancelled keeps a buffer and credit"]
pub struct Loan {
    stream: StreamId,
    slot: u16,
    len: u32,
    reservation: Reservation,
}

impl Loan {
    /// Bytes that may be filled.
    #[expect(clippy::len_without_is_empty, reason = "a loan is never empty")]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// The connection it belongs to.
    pub fn stream(&self) -> StreamId {
        self.stream
    }
}

impl Driver {
    /// Borrows a transmit buffer for a packet of at most `max` bytes, as many
    /// as credit and buffer size allow.
    pub fn loan(&mut self, stream: StreamId, max: u32) -> Result<Loan, SendError> {
        let entry = self.streams.get(stream).ok_or(SendError::Unknown)?;
        let flow = match (entry.state, entry.flow) {
            _ if entry.finished || entry.peer_deaf => return Err(SendError::ShutDown),
            (StreamState::Connecting, _) => return Err(SendError::NotConnected),
            (StreamState::Connected, Some(flow)) => flow,
            (StreamState::Finished, _) => return Err(SendError::ShutDown),
            _ => return Err(SendError::Reset),
        };
        if self.shard.has_transmit() {
            // A RESPONSE must not be overtaken by the data behind it.
            let now = self.now();
            self.transmit_control(now)?;
        }
        let Some(slot) = self.data_slot()? else {
            if let Some(entry) = self.streams.get_mut(stream)
                && !std::mem::replace(&mut entry.wants_room, true)
            {
                self.waiting_for_slot.push_back(stream);
            }
            return Err(SendError::WouldBlock);
        };
        let max = max.min(self.arena.tx_data.len());
        match self.shard.reserve(flow, max) {
            Ok(reservation) => {
                let len = reservation.len();
                Ok(Loan {
                    stream,
                    slot,
                    len,
                    reservation,
                })
            }
            Err(error) => {
                self.tx.put_back(slot);
                Err(match error {
                    ReserveError::NoCredit => SendError::WouldBlock,
                    ReserveError::NotConnected => SendError::NotConnected,
                    ReserveError::Shutdown | ReserveError::PeerShutdown => SendError::ShutDown,
                    ReserveError::Stale | ReserveError::Empty => SendError::Reset,
                })
            }
        }
    }

    /// Writes `bytes` into a loan at `offset`; returns how many fitted.
    pub fn fill(&mut self, loan: &Loan, offset: u32, bytes: &[u8]) -> usize {
        let room = loan.len.saturating_sub(offset) as usize;
        let bytes = &bytes[..bytes.len().min(room)];
        self.arena
            .memory
            .write(self.arena.tx_data.pieces(loan.slot), offset as usize, bytes)
    }

    /// Sends the first `len` bytes of a loan; the rest of its credit returns.
    /// Visible to the device with the next turn or flush.
    pub fn commit(&mut self, loan: Loan, len: u32) -> Result<(), SendError> {
        let len = len.min(loan.len);
        if len == 0 {
            self.cancel(loan);
            return Ok(());
        }
        match self.shard.commit(loan.reservation, len, 0) {
            Ok(header) => Ok(self.transmit(loan.slot, &header)?),
            Err(error) => {
                self.tx.put_back(loan.slot);
                Err(match error {
                    CommitError::Shutdown | CommitError::PeerShutdown => SendError::ShutDown,
                    _ => SendError::Reset,
                })
            }
        }
    }

    /// Gives a loan back unsent.
    pub fn cancel(&mut self, loan: Loan) {
        self.shard.cancel(loan.reservation);
        self.tx.put_back(loan.slot);
    }

    /// Sends as many of `bytes` as there is room for now, in packets as long
    /// as buffers and credit allow, and returns how many. Visible to the
    /// device with the next turn or flush.
    pub fn send(&mut self, stream: StreamId, bytes: &[u8]) -> Result<usize, SendError> {
        let mut sent = 0;
        while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
            let want = u32::try_from(rest.len()).unwrap_or(u32::MAX);
            let loan = match self.loan(stream, want) {
                Ok(loan) => loan,
                Err(SendError::WouldBlock) if sent > 0 => break,
                Err(error) => return Err(error),
            };
            let filled = self.fill(&loan, 0, rest);
            self.commit(loan, filled as u32)?;
            sent += filled;
        }
        Ok(sent)
    }

    /// Receives into `out`: at least one byte, or 0 at the end of the stream
    /// (or for an empty `out`).
    pub fn recv(&mut self, stream: StreamId, out: &mut [u8]) -> Result<usize, RecvError> {
        if self.streams.get(stream).is_none() {
            return Err(RecvError::Unknown);
        }
        let mut done = 0;
        while done < out.len() {
            let rest = &mut out[done..];
            match self.streams.next(stream) {
                Next::Slot { slot, start, end } => {
                    let len = rest.len().min((end - start) as usize);
                    let pieces = self.arena.rx_data.pieces(slot);
                    self.arena
                        .memory
                        .read(pieces, start as usize, &mut rest[..len]);
                    if let Some(slot) = self.streams.read_slot(stream, len as u32) {
                        self.give_back(slot)?;
                    }
                    done += len;
                }
                Next::Overflow => done += self.streams.read_overflow(stream, rest),
                Next::Empty => break,
            }
        }
        let Some(entry) = self.streams.get(stream) else {
            return Err(RecvError::Unknown);
        };
        if done > 0 {
            if let Some(flow) = entry.flow {
                // A flow that ended meanwhile wants no credit.
                let _ = self.shard.consume(flow, done as u32);
            }
            return Ok(done);
        }
        match entry.state {
            _ if out.is_empty() || entry.peer_finished => Ok(0),
            StreamState::Finished => Ok(0),
            StreamState::Reset => Err(RecvError::Reset),
            StreamState::Connecting | StreamState::Connected => Err(RecvError::WouldBlock),
        }
    }

    /// Bytes that [`Driver::recv`] would give at once.
    pub fn unread(&self, stream: StreamId) -> usize {
        self.streams.get(stream).map_or(0, |entry| entry.unread)
    }

    fn data_slot(&mut self) -> Result<Option<u16>, DriverError> {
        if !self.tx.has_data_slot() {
            self.tx.reap()?;
        }
        Ok(self.tx.data_slot())
    }
}
