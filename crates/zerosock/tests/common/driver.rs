//! A driver for tests that do one thing at a time: the product's driver with calls that wait, and events.
//!
//! The product drives a [`Driver`](product::Driver) through the trait [`Backend`]. This wrapper calls the same
//! methods from one thread, under the names that tests use, and sleeps between turns until a deadline.
#![allow(dead_code, unreachable_pub, reason = "each program uses its own part")]

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use zerosock::driver as product;
use zerosock::vsock::EndpointStats;

pub use zerosock::driver::{SendFault as SendError, *};

/// A change that [`Driver::poll`] returns. Each is returned once, several changes of a connection together.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum DriverEvent {
    /// Connections wait at a listener.
    Incoming {
        /// The listener's port.
        port: Port,
    },
    /// A connection has changed: its state, bytes to read, room to send, or what its peer has shut down.
    Ready {
        /// The connection.
        stream: StreamId,
    },
    /// The device announced a transport reset (virtio 1.2, 5.10.6.7.1).
    TransportReset,
    /// The device hung up.
    DeviceGone,
}

/// Why nothing was received.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RecvError {
    /// No unread bytes.
    #[error("no received bytes are available")]
    WouldBlock,
    /// The connection was reset, and all received bytes were read.
    #[error("the connection was reset")]
    Reset,
    /// No such connection.
    #[error("no such connection")]
    Unknown,
}

/// Why a call that waits failed.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// The deadline passed.
    #[error("the deadline passed")]
    TimedOut,
    /// A connect was refused, by the device or the peer behind it.
    #[error("connection refused")]
    Refused,
    /// Sending failed.
    #[error(transparent)]
    Send(SendError),
    /// Receiving failed.
    #[error(transparent)]
    Recv(RecvError),
    /// The stream ended before all requested bytes arrived.
    #[error("the stream ended before all requested bytes arrived")]
    Eof,
    /// The connect could not be started.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The driver cannot go on.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The product's driver, with the calls that tests make.
#[derive(Debug)]
pub struct Driver {
    driver: product::Driver,
    /// Transport resets returned as events.
    resets: u64,
    /// The hang-up of the device was returned as an event.
    is_gone: bool,
    /// What the last wait has returned.
    events: Events,
}

impl Deref for Driver {
    type Target = product::Driver;

    fn deref(&self) -> &product::Driver {
        &self.driver
    }
}

impl DerefMut for Driver {
    fn deref_mut(&mut self) -> &mut product::Driver {
        &mut self.driver
    }
}

impl Driver {
    /// Attaches to the device at `config.socket`.
    pub fn attach(config: DriverConfig) -> Result<Driver, DriverAttachError> {
        product::Driver::attach(config).map(Driver::new)
    }

    /// Attaches over a connected vhost-user socket.
    pub fn attach_over(
        socket: UnixStream,
        config: DriverConfig,
    ) -> Result<Driver, DriverAttachError> {
        product::Driver::attach_over(socket, config).map(Driver::new)
    }

    fn new(driver: product::Driver) -> Driver {
        Driver {
            driver,
            resets: 0,
            is_gone: false,
            events: Events::default(),
        }
    }

    /// The counters that endpoints have as well.
    pub fn endpoint_stats(&self) -> EndpointStats {
        Backend::stats(&self.driver)
    }

    /// Stops the queues, as a VMM does for a pause or a snapshot; returns the index at which each can continue.
    /// Until `resume` the device does not access the memory.
    pub fn suspend(&mut self) -> Result<Vec<u16>, FrontendError> {
        let queues = self.used_indices().len() as u32;
        let frontend = self.frontend().ok_or(FrontendError::Closed)?;
        (0..queues)
            .map(|index| frontend.get_vring_base(index))
            .collect()
    }

    /// Starts to connect to `peer`.
    pub fn connect(&mut self, peer: Address) -> Result<StreamId, ConnectError> {
        self.connect_from(Port::ANY, peer)
    }

    /// As [`connect`](Driver::connect), with a local port.
    pub fn connect_from(&mut self, port: Port, peer: Address) -> Result<StreamId, ConnectError> {
        Backend::connect(&mut self.driver, port, peer, SocketType::Stream)
    }

    /// Listens on `port`. As on Linux, at most `backlog + 1` connections wait to be accepted.
    pub fn listen(&mut self, port: Port, backlog: usize) -> Result<(), ListenError> {
        self.listen_for(port, backlog, SocketType::Stream)
    }

    /// As [`listen`](Driver::listen), with a socket type.
    pub fn listen_for(
        &mut self,
        port: Port,
        backlog: usize,
        socket_type: SocketType,
    ) -> Result<(), ListenError> {
        Backend::listen(&mut self.driver, port, backlog, socket_type)
    }

    /// Stops listening on `port` and resets connections that wait to be accepted.
    pub fn unlisten(&mut self, port: Port) {
        Backend::unlisten(&mut self.driver, port);
    }

    /// Accepts the oldest waiting connection on `port`.
    pub fn accept(&mut self, port: Port) -> Option<StreamId> {
        Backend::accept(&mut self.driver, port)
    }

    /// The state of a connection; `None` if it was closed.
    pub fn state(&self, stream: StreamId) -> Option<StreamState> {
        Some(self.driver.info(stream)?.state)
    }

    /// The local and the peer's address.
    pub fn addresses(&self, stream: StreamId) -> Option<(Address, Address)> {
        let info = self.driver.info(stream)?;
        Some((info.local, info.peer))
    }

    /// Received bytes that are not read.
    pub fn unread(&self, stream: StreamId) -> usize {
        self.driver.info(stream).map_or(0, |info| info.unread)
    }

    /// The queue pair of a connection.
    pub fn queue_pair(&self, stream: StreamId) -> Option<u16> {
        self.driver.info(stream)?;
        Some(Backend::queue_pair(&self.driver, stream))
    }

    /// Shuts down receiving, sending, or both.
    pub fn shutdown(&mut self, stream: StreamId, how: Directions) {
        Backend::shutdown(&mut self.driver, stream, how);
    }

    /// Closes a connection in order.
    pub fn close(&mut self, stream: StreamId) {
        Backend::close(&mut self.driver, stream);
    }

    /// Resets a connection.
    pub fn abort(&mut self, stream: StreamId) {
        Backend::abort(&mut self.driver, stream);
    }

    /// Sends as many of `bytes` as credit and buffers allow. Visible to the device after the next turn or flush.
    pub fn send(&mut self, stream: StreamId, bytes: &[u8]) -> Result<usize, SendError> {
        if bytes.is_empty() {
            return Ok(0);
        }
        self.driver.write(stream, bytes, Publish::Later)
    }

    /// Receives into `out` from what turns have received: at least one byte, or 0 at the end of the stream or
    /// for an empty `out`.
    pub fn recv(&mut self, stream: StreamId, out: &mut [u8]) -> Result<usize, RecvError> {
        // Other reads of a connection without unread bytes take packets out of the queue.
        let peek = self.unread(stream) == 0;
        self.driver
            .read(stream, out, peek)
            .map_err(|fault| match fault {
                RecvFault::Reset => RecvError::Reset,
                RecvFault::Unknown => RecvError::Unknown,
                _ => RecvError::WouldBlock,
            })
    }

    /// The next event that was not returned. Takes no turn.
    pub fn next_event(&mut self) -> Option<DriverEvent> {
        let is_gone = !self.is_attached();
        if std::mem::replace(&mut self.is_gone, is_gone) != is_gone && is_gone {
            return Some(DriverEvent::DeviceGone);
        }
        if self.resets < self.driver.stats().transport_resets {
            self.resets += 1;
            return Some(DriverEvent::TransportReset);
        }
        loop {
            return Some(match self.driver.next_ready()? {
                ReadySource::Port(port) => DriverEvent::Incoming { port },
                ReadySource::Conn(stream) => DriverEvent::Ready { stream },
                ReadySource::Datagram(_) => continue,
            });
        }
    }

    /// Takes turns, and sleeps in between, until there is an event or `deadline` has passed (`None`: no limit).
    /// Returns `Ok(None)` after the deadline.
    pub fn poll(&mut self, deadline: Option<Instant>) -> Result<Option<DriverEvent>, DriverError> {
        loop {
            let busy = self.drive()?;
            if let Some(event) = self.next_event() {
                return Ok(Some(event));
            }
            if deadline.is_some_and(|at| at <= Instant::now()) {
                return Ok(None);
            }
            if !busy {
                self.sleep(deadline)?;
            }
        }
    }

    /// Sleeps until the device notifies, a timer is due, or `deadline`; returns at once if work arrived while
    /// arming, or without a device.
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        if !self.driver.arm() {
            let until = self.driver.next_timeout().into_iter().chain(deadline).min();
            let timeout = until.map(|at| at.saturating_duration_since(Instant::now()));
            self.events.wait(self.driver.fd(), timeout)?;
            self.driver.handle_events(&self.events);
        }
        self.driver.disarm();
        Ok(())
    }

    /// Takes turns and sleeps until `ready` returns a value, or until `deadline` (`Ok(None)`). `ready` is called
    /// after every turn. Events stay queued.
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
            Some(_) => self.close(stream),
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

    /// Receives until `out` is full; [`WaitError::Eof`] if the stream ends before.
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
