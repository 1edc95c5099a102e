//! Blocking calls, for programs and tests that do one thing at a time.
//!
//! They drive the driver as [`Driver::poll`] does. Events stay queued, so that both styles can be
//! mixed.

use std::time::Instant;

use zerosock_proto::{Address, Port};

use super::Driver;
use super::errors::{DriverError, RecvError, SendError, WaitError};
use super::{StreamId, StreamState};

impl Driver {
    /// Takes turns and sleeps until `ready` returns a value, or until `deadline` (`Ok(None)`).
    /// `ready` is called after every turn.
    pub fn wait_until<T>(
        &mut self,
        deadline: Instant,
        mut ready: impl FnMut(&mut Driver) -> Option<T>,
    ) -> Result<Option<T>, DriverError> {
        loop {
            let busy = self.drive()?;
            if let Some(found) = ready(self) {
                // Publishes what `ready` queued.
                self.flush();
                return Ok(Some(found));
            }
            if deadline <= Instant::now() {
                return Ok(None);
            }
            if !busy {
                self.flush();
                self.sleep(Some(deadline))?;
            }
        }
    }

    /// Connects to `peer` and waits for the answer.
    pub fn wait_connect(
        &mut self,
        peer: Address,
        deadline: Instant,
    ) -> Result<StreamId, WaitError> {
        let stream = self.connect(peer)?;
        let state = self.wait_until(deadline, |driver| {
            driver
                .state(stream)
                .filter(|state| *state != StreamState::Connecting)
        })?;
        match state {
            // Finished: the peer has shut down since, but bytes may be unread.
            Some(StreamState::Connected | StreamState::Finished) => return Ok(stream),
            Some(_) => self.close(stream)?,
            None => {
                self.abort(stream);
                self.drive()?;
                return Err(WaitError::TimedOut);
            }
        }
        Err(WaitError::Refused)
    }

    /// Waits for a connection to the listening `port`.
    pub fn wait_accept(&mut self, port: Port, deadline: Instant) -> Result<StreamId, WaitError> {
        self.wait_until(deadline, |driver| driver.accept(port))?
            .ok_or(WaitError::TimedOut)
    }

    /// Sends all of `bytes`.
    pub fn wait_send(
        &mut self,
        stream: StreamId,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<(), WaitError> {
        let mut sent = 0;
        let done = self.wait_until(deadline, |driver| {
            while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
                match driver.send(stream, rest) {
                    Ok(more) => sent += more,
                    Err(SendError::WouldBlock) => return None,
                    Err(error) => return Some(Err(error)),
                }
            }
            Some(Ok(()))
        })?;
        match done {
            Some(result) => result.map_err(WaitError::Send),
            None => Err(WaitError::TimedOut),
        }
    }

    /// Receives the available bytes, at least one; returns 0 at the end of the stream.
    pub fn wait_recv(
        &mut self,
        stream: StreamId,
        out: &mut [u8],
        deadline: Instant,
    ) -> Result<usize, WaitError> {
        let done = self.wait_until(deadline, |driver| match driver.recv(stream, out) {
            Err(RecvError::WouldBlock) => None,
            other => Some(other),
        })?;
        match done {
            Some(result) => result.map_err(WaitError::Recv),
            None => Err(WaitError::TimedOut),
        }
    }

    /// Receives until `out` is full; [`WaitError::Eof`] if the stream ends
    /// before.
    pub fn wait_recv_exact(
        &mut self,
        stream: StreamId,
        out: &mut [u8],
        deadline: Instant,
    ) -> Result<(), WaitError> {
        let mut got = 0;
        while got < out.len() {
            match self.wait_recv(stream, &mut out[got..], deadline)? {
                0 => return Err(WaitError::Eof),
                more => got += more,
            }
        }
        Ok(())
    }

    /// Receives to the end of the stream and appends to `out`.
    pub fn wait_recv_to_end(
        &mut self,
        stream: StreamId,
        out: &mut Vec<u8>,
        deadline: Instant,
    ) -> Result<(), WaitError> {
        let mut part = vec![0u8; 65536];
        loop {
            match self.wait_recv(stream, &mut part, deadline)? {
                0 => return Ok(()),
                more => out.extend_from_slice(&part[..more]),
            }
        }
    }
}
