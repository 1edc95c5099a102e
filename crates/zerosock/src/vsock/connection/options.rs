//! What a connection can be told, and asked, beside what it carries: its buffer, its time-outs, its
//! end. [`option_calls`] gives each kind of socket the calls for it.
//!
//! What must hold: what is set here is in force when the call returns, and the peer hears of what
//! concerns it; an end that lingers has shut sending down before it waits. Options are locked
//! behind the endpoint, never the other way round.

use std::io;
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Connection, encode_timeout};
use zerosock_proto::vsock::MoveError;

use crate::io::deadline::{deadline_in, earlier};
use crate::table::backend::Backend;
use crate::table::sockets::{StreamId, StreamState};
use crate::vsock::errors::StreamError;
use crate::vsock::hub::{DeferredClose, Interest, WaitBudget, WaitFault, WaitMode};
use crate::vsock::options::{Options, timeout};
use crate::vsock::socket::Bound;
use crate::vsock::waiting::Wait;

/// After which time an end that lingers asks its peer again how much it has taken, at first.
const FIRST_QUESTION: Duration = Duration::from_millis(1);
/// And in the end.
const LAST_QUESTION: Duration = Duration::from_millis(64);

impl Connection {
    pub(in crate::vsock) fn options(&self) -> MutexGuard<'_, Options> {
        // What is kept is whole whenever it can be seen.
        self.options.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what its listener, or the socket that it was made of, was told; the receive
    /// buffer is so already.
    pub(in crate::vsock) fn adopt(&mut self, options: Options, bound: Option<Bound>) {
        self.bound = bound;
        *self.options() = options;
        self.read_timeout
            .store(encode_timeout(options.read_timeout), Ordering::Relaxed);
        self.write_timeout
            .store(encode_timeout(options.write_timeout), Ordering::Relaxed);
    }

    /// Gives up the port that it was connected from, if that was chosen.
    pub(in crate::vsock) fn unbind(&mut self) -> Option<Bound> {
        self.bound.take()
    }

    pub(in crate::vsock) fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        let time = timeout(time)?;
        self.options().read_timeout = time;
        self.read_timeout
            .store(encode_timeout(time), Ordering::Relaxed);
        Ok(())
    }

    pub(in crate::vsock) fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        let time = timeout(time)?;
        self.options().write_timeout = time;
        self.write_timeout
            .store(encode_timeout(time), Ordering::Relaxed);
        Ok(())
    }

    /// A buffer of `bytes`, brought within its bounds; of how many it is then.
    pub(in crate::vsock) fn set_buffer_size(&self, bytes: u32) -> io::Result<u32> {
        let bytes = self.options().set_buffer(bytes)?;
        self.resize(bytes);
        Ok(bytes)
    }

    pub(in crate::vsock) fn buffer_size(&self) -> u32 {
        let mut locked = self.core.lock();
        let credit = locked.engine().credit(self.id);
        drop(locked);
        match credit {
            Some(credit) => credit.buffer,
            None => self.options().buffer.unwrap_or(self.core.window()),
        }
    }

    /// How many bytes the buffer has then, if that has changed.
    pub(in crate::vsock) fn set_buffer_bounds(
        &self,
        min: u32,
        max: u32,
    ) -> io::Result<Option<u32>> {
        let now = self.buffer_size();
        let changed = self.options().set_bounds(min, max, now)?;
        if let Some(bytes) = changed {
            self.resize(bytes);
        }
        Ok(changed)
    }

    pub(in crate::vsock) fn queue_pair(&self) -> u16 {
        self.core.lock().engine().queue_pair(self.id)
    }

    /// Asks for the move, and waits for what comes of it.
    pub(in crate::vsock) fn move_to_queue_pair(&self, pair: u16) -> io::Result<()> {
        let mut asked = false;
        let attempt = |engine: &mut dyn Backend| match engine.queue_pair(self.id) {
            there if there == pair => Some(Ok(())),
            _ if engine.is_moving(self.id) => {
                asked = true;
                None
            }
            _ if std::mem::replace(&mut asked, true) => Some(Err(MoveError::Busy)),
            _ => match engine.move_to_pair(self.id, pair) {
                Ok(()) => {
                    engine.flush();
                    None
                }
                Err(error) => Some(Err(error)),
            },
        };
        let interest = Interest::Conn(self.id);
        let moved = self.core.wait(interest, self.write_patience(), attempt)?;
        moved.map_err(|error| {
            let kind = match error {
                MoveError::Busy => io::ErrorKind::ResourceBusy,
                MoveError::NotNegotiated => io::ErrorKind::Unsupported,
                MoveError::Stale | MoveError::WrongState => io::ErrorKind::NotConnected,
            };
            io::Error::new(kind, error)
        })
    }

    fn resize(&self, bytes: u32) {
        let mut locked = self.core.lock();
        locked.engine().set_buffer(self.id, bytes);
        locked.engine().flush();
    }

    /// How many bytes a read waits for.
    pub(in crate::vsock) fn set_low_water(&self, bytes: u32) -> io::Result<u32> {
        let mut locked = self.core.lock();
        let engine = locked.engine();
        let buffer = engine.credit(self.id).map_or(u32::MAX, |it| it.buffer);
        let bytes = self.options().set_low_water(bytes, buffer)?;
        engine.set_low_water(self.id, bytes);
        engine.flush_after_read();
        Ok(bytes)
    }

    pub(in crate::vsock) fn unread(&self) -> usize {
        let mut locked = self.core.lock();
        // What has come counts; an endpoint that is over still has what came before.
        let _ = locked.turn();
        locked.engine().info(self.id).map_or(0, |info| info.unread)
    }

    pub(in crate::vsock) fn unsent(&self) -> usize {
        let mut locked = self.core.lock();
        let _ = locked.turn();
        let engine = locked.engine();
        let unsent = unsent(engine, self.id);
        if unsent > 0 {
            engine.ask_progress(self.id);
            engine.flush();
        }
        unsent as usize
    }

    /// Waits as long as it was told to linger. What is left to do is done by the drop.
    pub(in crate::vsock) fn close(&self) -> io::Result<()> {
        let linger = self.options().linger;
        let Some(time) = linger.filter(|time| !time.is_zero()) else {
            return Ok(());
        };
        // Not twice.
        self.options().linger = None;
        match self.waiting() {
            Some(wait) => self.await_end(wait, deadline_in(time)),
            None => Ok(()),
        }
    }

    /// The end, when it is dropped.
    pub(super) fn end(&self) {
        let linger = self.options().linger;
        match linger {
            None => {}
            Some(Duration::ZERO) => return self.core.end(DeferredClose::Reset(self.id)),
            Some(time) => {
                if let Some(wait) = self.waiting().filter(|_| !self.core.is_mine()) {
                    // There is nobody to be told.
                    let _ = self.await_end(wait, deadline_in(time));
                }
            }
        }
        self.core.end(DeferredClose::Stream(self.id));
    }

    /// How calls wait, if they do.
    fn waiting(&self) -> Option<Wait> {
        match self.read_patience().mode {
            WaitMode::Waits(wait) => Some(wait),
            _ => None,
        }
    }

    /// Waits until the peer has taken everything, and then for its answer to the end. In this
    /// order: Linux knows a connection no more whose peer has shut both ways down, and cannot be
    /// asked; what its program has not read by then it would never tell.
    fn await_end(&self, wait: Wait, deadline: Option<Instant>) -> io::Result<()> {
        // Not connected: there is nothing to wait for.
        let _ = self.shutdown(Shutdown::Write);
        self.await_taken(wait, deadline)?;
        let _ = self.shutdown(Shutdown::Both);
        let budget = WaitBudget {
            mode: WaitMode::Waits(wait),
            deadline,
        };
        let ended = self.core.wait(Interest::Conn(self.id), budget, |engine| {
            match engine.info(self.id).map(|info| info.state) {
                Some(StreamState::Connected) => None,
                Some(StreamState::Reset) => Some(Err(StreamError::Reset)),
                // One that was never connected has sent nothing.
                _ => Some(Ok(())),
            }
        })?;
        Ok(ended?)
    }

    /// Asks the peer how much it has taken, less and less often, until that is everything, or it
    /// takes no more.
    fn await_taken(&self, wait: Wait, deadline: Option<Instant>) -> Result<(), WaitFault> {
        let mut pause = FIRST_QUESTION;
        loop {
            let budget = WaitBudget {
                mode: WaitMode::Waits(wait),
                deadline: earlier(deadline, deadline_in(pause)),
            };
            let mut asked = false;
            let taken = self.core.wait(Interest::Conn(self.id), budget, |engine| {
                let takes = engine
                    .info(self.id)
                    .is_some_and(|it| it.state == StreamState::Connected && !it.peer_recv_shutdown);
                if !takes || (unsent(engine, self.id) == 0 && !engine.is_sending(self.id)) {
                    return Some(());
                }
                if !std::mem::replace(&mut asked, true) {
                    engine.ask_progress(self.id);
                    engine.flush();
                }
                None
            });
            match taken {
                Err(WaitFault::TimedOut) if deadline.is_none_or(|at| at > Instant::now()) => {
                    pause = (pause * 2).min(LAST_QUESTION);
                }
                taken => return taken,
            }
        }
    }
}

/// Bytes that the peer is not known to have taken.
fn unsent(engine: &mut dyn Backend, id: StreamId) -> u32 {
    engine.credit(id).map_or(0, |credit| credit.unsent)
}

/// The calls for options that every kind of connected socket has, for a type with a `conn`.
macro_rules! option_calls {
    ($socket:ident) => {
        impl $socket {
            /// The smallest and the largest receive buffer, in bytes.
            pub fn buffer_bounds(&self) -> (u32, u32) {
                self.conn.options().bounds()
            }

            /// Bytes of the receive buffer (SO_VM_SOCKETS_BUFFER_SIZE).
            pub fn buffer_size(&self) -> u32 {
                self.conn.buffer_size()
            }

            /// How long a read or receive may wait; `None`: for ever.
            ///
            /// # Errors
            /// With an [`OptionError`](crate::vsock::OptionError) inside: `InvalidInput` for a time
            /// of zero, as in `std::net`.
            pub fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
                self.conn.set_read_timeout(time)
            }

            /// How long a read or receive may wait.
            pub fn read_timeout(&self) -> Option<Duration> {
                self.conn.options().read_timeout
            }

            /// How long a write, a send or a loan may wait; `None`: for ever.
            ///
            /// # Errors
            /// With an [`OptionError`](crate::vsock::OptionError) inside: `InvalidInput` for a time
            /// of zero, as in `std::net`.
            pub fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
                self.conn.set_write_timeout(time)
            }

            /// How long a write, a send or a loan may wait.
            pub fn write_timeout(&self) -> Option<Duration> {
                self.conn.options().write_timeout
            }

            /// What becomes of what was sent when the socket is dropped or [closed](Self::close)
            /// (SO_LINGER).
            ///
            /// - `None`, at first: it still arrives, and nobody waits for it.
            /// - Some time: the end waits so long for the peer to take all of it and to say so; what
            ///   it has not taken by then still arrives. Only for sockets that wait: a
            ///   [non-blocking](Self::set_nonblocking) one ends as with `None`. Between two
            ///   processes or guests of one device it is the device that takes it: then all of it
            ///   lies in the other's buffers, or will without us.
            /// - [`Duration::ZERO`]: the connection is reset, and what is under way is lost.
            pub fn set_linger(&self, linger: Option<Duration>) {
                self.conn.options().linger = linger;
            }

            /// See [`set_linger`](Self::set_linger).
            pub fn linger(&self) -> Option<Duration> {
                self.conn.options().linger
            }

            /// Ends the connection as dropping the socket does, and says how that went.
            ///
            /// ```
            /// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
            /// use std::io::{ErrorKind, Read, Write};
            /// use std::time::Duration;
            ///
            /// (&process).write_all(b"read me")?;
            /// process.set_linger(Some(Duration::from_millis(10)));
            /// // Nobody reads it.
            /// assert_eq!(process.close().unwrap_err().kind(), ErrorKind::TimedOut);
            /// let mut late = String::new();
            /// (&host).read_to_string(&mut late)?;
            /// assert_eq!(late, "read me");
            /// # Ok::<(), Box<dyn std::error::Error>>(())
            /// ```
            ///
            /// # Errors
            /// Only with [`set_linger`](Self::set_linger): `TimedOut` when the peer has not taken
            /// all in time, `ConnectionReset` when it has reset the connection, and may not have
            /// taken all.
            pub fn close(self) -> io::Result<()> {
                self.conn.close()
            }

            /// The number of the queue pair at which the connection is
            /// ([`EndpointBuilder::queue_pairs`](crate::vsock::EndpointBuilder::queue_pairs)).
            pub fn queue_pair(&self) -> u16 {
                self.conn.queue_pair()
            }

            /// Moves the connection to queue pair `pair`, for a program that shares its work out over
            /// the workers of the device better than the hash of addresses does. It is quiet for one
            /// and a half round trips; bytes keep their order. What is held unread in place is copied
            /// once. Waits as a write does; one that does not wait has asked, and
            /// [`queue_pair`](Self::queue_pair) tells later.
            ///
            /// # Errors
            /// `Unsupported` at a host, and for a pair that is not used; `ResourceBusy` while a loan
            /// is out or a message half sent, at either side, and when the device refuses;
            /// `NotConnected`; `WouldBlock`, `TimedOut`.
            pub fn move_to_queue_pair(&self, pair: u16) -> io::Result<()> {
                self.conn.move_to_queue_pair(pair)
            }

            /// Bytes that were sent and that the peer is not known to have taken (SIOCOUTQ). A peer
            /// tells of itself only now and then what it has taken, so this asks it: call again to
            /// see the answer. As with [`set_linger`](Self::set_linger), a device between two
            /// processes takes what it passes on.
            pub fn unsent(&self) -> usize {
                self.conn.unsent()
            }
        }
    };
}
pub(in crate::vsock) use option_calls;
