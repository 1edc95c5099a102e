//! A backend without queues that follows a script, for tests of waiters.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use zerosock_proto::vsock::{ConnectError, Directions, ListenError};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Port};
use zerosock_virtio::poller::Events;

use super::Fault;
use super::hub::Core;
use crate::table::calls::{ConnectionCalls, CreditInfo};
use crate::table::leases::Leases;
use crate::table::over::EndpointEnded;
use crate::table::sending::SendingCalls;
use crate::table::sockets::{Copied, LeaseParts, Received, StreamId, StreamState};
use crate::table::{
    backend::{Ahead, Backend, ConnInfo, EndpointStats, ReadySource},
    transfers::{LoanParts, LoanedPart, Payload, Publish, RecvFault, SendFault},
};

/// What the backend reports, and the calls that it has recorded.
#[derive(Debug, Default)]
pub(crate) struct Script {
    /// When its timer is due; the next turn after that counts it in `fired`.
    pub(crate) due: Option<Instant>,
    pub(crate) stale: bool,
    pub(crate) stirred: VecDeque<ReadySource>,
    pub(crate) over: bool,
    pub(crate) answered: bool,
    /// Timers that fired.
    pub(crate) fired: u32,
    pub(crate) arms: u32,
    pub(crate) settled: u32,
    pub(crate) given_back: Vec<u32>,
    pub(crate) connected: u32,
    pub(crate) closed: u32,
    pub(crate) unlistened: Vec<Port>,
}

pub(crate) type Scripted = Arc<Mutex<Script>>;

#[derive(Debug)]
struct Fake {
    script: Scripted,
    words: Arc<Leases>,
    fd: OwnedFd,
}

/// An endpoint with a scripted backend.
pub(crate) fn core() -> (Arc<Core>, Scripted) {
    let script = Scripted::default();
    let backend = Fake {
        script: script.clone(),
        words: Arc::new(Leases::new(8)),
        fd: epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
    };
    let core = Core::new(Box::new(backend), None, None).unwrap();
    (Arc::new(core), script)
}

/// The state of every connection of the backend.
pub(crate) fn info(state: StreamState) -> ConnInfo {
    ConnInfo {
        state,
        refused: None,
        local: Address::new(Cid::new(3), Port::new(1)),
        peer: Address::new(Cid::new(4), Port::new(1)),
        unread: 0,
        messages: None,
        taken: 0,
        low_water: 1,
        at_end: false,
        peer_recv_shutdown: false,
        trusted: false,
    }
}

impl Fake {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }
}

impl ConnectionCalls for Fake {
    fn info(&self, _: StreamId) -> Option<ConnInfo> {
        Some(info(if self.script().answered {
            StreamState::Connected
        } else {
            StreamState::Connecting
        }))
    }

    fn ahead(&mut self, _: StreamId) -> Option<Ahead> {
        None
    }

    fn read(&mut self, _: StreamId, _: &mut [u8], _: bool) -> Result<usize, RecvFault> {
        Err(RecvFault::WouldBlock)
    }

    fn skip(&mut self, _: StreamId, _: usize) -> usize {
        0
    }

    fn set_low_water(&mut self, _: StreamId, _: u32) {}

    fn set_buffer(&mut self, _: StreamId, _: u32) {}

    fn credit(&self, _: StreamId) -> Option<CreditInfo> {
        None
    }

    fn request_credit_update(&mut self, _: StreamId) {}

    fn lease(&mut self, _: StreamId) -> Result<Option<LeaseParts>, RecvFault> {
        Err(RecvFault::WouldBlock)
    }

    /// One packet.
    fn consume_in_place(
        &mut self,
        _: StreamId,
        _: usize,
        look: &mut dyn FnMut(Payload<'_>) -> bool,
    ) -> Result<usize, RecvFault> {
        look(Payload::copied(b"packet"));
        Ok(1)
    }

    fn read_message(
        &mut self,
        _: StreamId,
        _: &mut [u8],
        _: bool,
    ) -> Result<Option<Received>, RecvFault> {
        Err(RecvFault::WouldBlock)
    }

    fn lease_message(&mut self, _: StreamId) -> Result<Option<(Vec<LeaseParts>, bool)>, RecvFault> {
        Err(RecvFault::WouldBlock)
    }

    fn set_coalesces(&mut self, _: StreamId, _: bool) {}

    fn flush_coalesced(&mut self, _: StreamId) {}

    fn can_coalesce_more(&mut self, _: StreamId) -> Option<bool> {
        None
    }
}

impl SendingCalls for Fake {
    fn write(&mut self, _: StreamId, _: &[u8], _: Publish) -> Result<usize, SendFault> {
        Err(SendFault::WouldBlock)
    }

    fn loan(&mut self, _: StreamId, _: usize) -> Result<LoanParts, SendFault> {
        Err(SendFault::WouldBlock)
    }

    fn send_loan(&mut self, _: u32, _: usize, _: Option<&[u8]>) -> Result<usize, SendFault> {
        Err(SendFault::Unknown)
    }

    fn send_message(&mut self, _: StreamId, _: &[IoSlice<'_>], _: bool) -> Result<bool, SendFault> {
        Err(SendFault::WouldBlock)
    }

    fn loan_message(&mut self, _: StreamId, _: usize) -> Result<Vec<LoanParts>, SendFault> {
        Err(SendFault::WouldBlock)
    }

    fn send_message_loan(
        &mut self,
        _: StreamId,
        _: &[LoanedPart<'_>],
        _: bool,
    ) -> Result<bool, SendFault> {
        Err(SendFault::Unknown)
    }

    fn is_sending(&self, _: StreamId) -> bool {
        false
    }

    fn may_send_message(&mut self, _: StreamId) -> bool {
        false
    }
}

impl Backend for Fake {
    fn lease_table(&self) -> Arc<Leases> {
        self.words.clone()
    }

    fn pending(&mut self) -> bool {
        false
    }

    fn drive(&mut self) -> Result<bool, EndpointEnded> {
        let mut script = self.script();
        if script.over {
            return Err(EndpointEnded::new(Fault::Peer, "over"));
        }
        if script.due.is_some_and(|at| at <= Instant::now()) {
            script.due = None;
            script.fired += 1;
        }
        Ok(false)
    }

    fn flush(&mut self) {}

    fn flush_after_read(&mut self) {
        self.script().settled += 1;
    }

    fn arm(&mut self) -> bool {
        let mut script = self.script();
        script.arms += 1;
        script.stale = false;
        script.over
    }

    fn is_stale(&self) -> bool {
        self.script().stale
    }

    fn disarm(&mut self) {}

    fn handle_events(&mut self, _: &Events) {}

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn next_ready(&mut self) -> Option<ReadySource> {
        self.script().stirred.pop_front()
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.script().due
    }

    fn connect(&mut self, _: Port, _: Address, _: SocketType) -> Result<StreamId, ConnectError> {
        self.script().connected += 1;
        Ok(StreamId::FIRST)
    }

    fn listen(&mut self, _: Port, _: usize, _: SocketType) -> Result<(), ListenError> {
        Ok(())
    }

    fn unlisten(&mut self, port: Port) {
        self.script().unlistened.push(port);
    }

    fn bind(&mut self, port: Port) -> Result<Port, ListenError> {
        Ok(port)
    }

    fn unbind(&mut self, _: Port) {}

    fn set_accept_buffer(&mut self, _: Port, _: u32) {}

    fn accept(&mut self, _: Port) -> Option<StreamId> {
        None
    }

    fn shutdown(&mut self, _: StreamId, _: Directions) {}

    fn close(&mut self, _: StreamId) {
        self.script().closed += 1;
    }

    fn abort(&mut self, id: StreamId) {
        self.close(id);
    }

    fn queue_pair(&self, _: StreamId) -> u16 {
        0
    }

    fn set_connect_timeout(&mut self, _: StreamId, _: Duration) {}

    fn copy_of(&self, _: u32) -> Option<Copied> {
        None
    }

    fn handle_dropped(&mut self, index: u32) {
        self.script().given_back.push(index);
    }

    fn is_acceptable(&self, _: Port) -> bool {
        false
    }

    fn stats(&self) -> EndpointStats {
        EndpointStats::default()
    }
}
