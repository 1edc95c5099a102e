//! The ports that a program listens on, and the connections that wait there to be accepted.
//!
//! # Invariants
//! - A connection waits on one port.
//! - A port with a waiting connection that was not reported is on the list of ready ports; no port is
//!   on it twice.

use std::collections::VecDeque;

use zerosock_proto::Port;
use zerosock_proto::wire::vsock::SocketType;

use super::sockets::StreamId;
use crate::stats::RefusalCause;

/// A port that the program listens on.
#[derive(Debug)]
struct Listener {
    port: Port,
    socket_type: SocketType,
    backlog: usize,
    /// Receive buffer of accepted connections in bytes, if it differs from the default.
    buffer: Option<u32>,
    waiting: VecDeque<StreamId>,
    /// On the list of ready ports.
    in_ready: bool,
}

/// Why a request is not admitted: for the counters, and in words.
pub(crate) type Refused = (RefusalCause, &'static str);

/// The listeners of an endpoint: see the module.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    all: Vec<Listener>,
    ready: VecDeque<Port>,
}

impl Listeners {
    fn get(&self, port: Port) -> Option<&Listener> {
        self.all.iter().find(|listener| listener.port == port)
    }

    fn get_mut(&mut self, port: Port) -> Option<&mut Listener> {
        self.all.iter_mut().find(|listener| listener.port == port)
    }

    pub(crate) fn contains(&self, port: Port) -> bool {
        self.get(port).is_some()
    }

    /// Adds a listener on a port that has none.
    pub(crate) fn add(&mut self, port: Port, backlog: usize, socket_type: SocketType) {
        self.all.push(Listener {
            port,
            socket_type,
            backlog,
            buffer: None,
            waiting: VecDeque::new(),
            in_ready: false,
        });
    }

    /// Removes a listener. Returns the connections that wait there, which the caller resets.
    pub(crate) fn remove(&mut self, port: Port) -> VecDeque<StreamId> {
        self.ready.retain(|&ready| ready != port);
        let mut all = self.all.iter();
        match all.position(|listener| listener.port == port) {
            Some(at) => self.all.swap_remove(at).waiting,
            None => VecDeque::new(),
        }
    }

    /// Sets the receive buffer of connections that are accepted on `port` from now on.
    pub(crate) fn set_buffer(&mut self, port: Port, bytes: u32) {
        if let Some(listener) = self.get_mut(port) {
            listener.buffer = Some(bytes);
        }
    }

    /// Whether a request may wait on `port`. Returns the receive buffer, if it differs from the default.
    pub(crate) fn admit(
        &self,
        port: Port,
        socket_type: SocketType,
    ) -> Result<Option<u32>, Refused> {
        let (cause, reason) = match self.get(port) {
            None => (RefusalCause::NoListener, "the port has no listener"),
            Some(it) if it.socket_type != socket_type => {
                let reason = "the listener on the port has another socket type";
                (RefusalCause::NoListener, reason)
            }
            Some(it) if it.waiting.len() > it.backlog => {
                (RefusalCause::BacklogFull, "the listener's backlog is full")
            }
            Some(it) => return Ok(it.buffer),
        };
        Err((cause, reason))
    }

    /// Adds a connection to those that wait on `port`.
    pub(crate) fn push(&mut self, port: Port, stream: StreamId) {
        if let Some(listener) = self.get_mut(port) {
            listener.waiting.push_back(stream);
            if !std::mem::replace(&mut listener.in_ready, true) {
                self.ready.push_back(port);
            }
        }
    }

    /// Removes the oldest connection that waits on `port`.
    pub(crate) fn accept(&mut self, port: Port) -> Option<StreamId> {
        self.get_mut(port)?.waiting.pop_front()
    }

    pub(crate) fn has_waiting(&self, port: Port) -> bool {
        let listener = self.get(port);
        listener.is_some_and(|listener| !listener.waiting.is_empty())
    }

    /// The next port with connections that were not reported; they count as reported then.
    pub(crate) fn next_port(&mut self) -> Option<Port> {
        loop {
            let port = self.ready.pop_front()?;
            let listener = self.get_mut(port)?;
            listener.in_ready = false;
            if !listener.waiting.is_empty() {
                return Some(port);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Port = Port::new(1);
    const B: Port = Port::new(2);

    fn two() -> Listeners {
        let mut all = Listeners::default();
        all.add(A, 1, SocketType::Stream);
        all.add(B, 1, SocketType::Stream);
        all
    }

    #[test]
    fn each_port_is_reported_once() {
        let mut all = two();
        for port in [A, A, B] {
            all.push(port, StreamId::FIRST);
        }
        let reported: Vec<Port> = std::iter::from_fn(|| all.next_port()).collect();
        assert_eq!(reported, [A, B]);
        assert_eq!(all.next_port(), None);
        all.push(A, StreamId::FIRST);
        all.push(A, StreamId::FIRST);
        assert_eq!((all.next_port(), all.next_port()), (Some(A), None));
        let accepted = std::iter::from_fn(|| all.accept(A));
        assert_eq!(accepted.count(), 4);
    }

    #[test]
    fn accepted_connection_is_not_reported() {
        let mut all = two();
        all.push(A, StreamId::FIRST);
        assert!(all.accept(A).is_some() && !all.has_waiting(A));
        assert_eq!(all.next_port(), None);
        all.push(A, StreamId::FIRST);
        assert_eq!((all.next_port(), all.next_port()), (Some(A), None));
    }

    #[test]
    fn removed_listener_leaves_no_entry() {
        let mut all = two();
        for _ in 0..3 {
            all.push(A, StreamId::FIRST);
            assert_eq!(all.remove(A), [StreamId::FIRST]);
            assert!(!all.contains(A) && all.ready.is_empty());
            all.add(A, 1, SocketType::Stream);
        }
    }

    #[test]
    fn request_is_admitted_by_type_and_backlog() {
        let (mut all, stream) = (two(), SocketType::Stream);
        let admit = |all: &Listeners, port, socket_type| {
            all.admit(port, socket_type).map_err(|(cause, _)| cause)
        };
        all.set_buffer(A, 4096);
        assert_eq!(admit(&all, A, stream), Ok(Some(4096)));
        assert_eq!(admit(&all, B, stream), Ok(None));
        let other = admit(&all, A, SocketType::SeqPacket);
        assert_eq!(other, Err(RefusalCause::NoListener));
        for expected in [Ok(Some(4096)), Err(RefusalCause::BacklogFull)] {
            all.push(A, StreamId::FIRST);
            assert_eq!(admit(&all, A, stream), expected);
        }
        all.remove(A);
        assert_eq!(admit(&all, A, stream), Err(RefusalCause::NoListener));
    }
}
