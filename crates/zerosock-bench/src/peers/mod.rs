//! The contestants: zerosock and its peers, each as a pair of worker processes.
//!
//! # Invariants
//! - A contestant that cannot run is reported with the reason.

pub(crate) mod bare;
pub(crate) mod bytes;
pub(crate) mod datagrams;
pub(crate) mod dequeue;
pub(crate) mod dpdk;
pub(crate) mod iceoryx2;
pub(crate) mod install;
pub(crate) mod ours;
pub(crate) mod paced_udp;
pub(crate) mod pipe;
pub(crate) mod slow_reader;
pub(crate) mod tcp;
pub(crate) mod trust;
pub(crate) mod unix;
pub(crate) mod vsock;

use std::ffi::OsString;
use std::path::PathBuf;

use crate::binary::Binary;
use crate::worker;
use crate::worker::order::{Order, Wait};
use crate::worker::touch::Fault;

/// A means of transport between two processes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Contestant {
    Ours,
    /// Ours, both sides by the program of another release.
    Release(Binary),
    Unix,
    Tcp,
    Pipe,
    Iceoryx2,
    /// Two threads over plain shared buffers: not a peer but the ceiling.
    Bare,
    /// Ours, by datagrams.
    Datagrams,
    /// UDP over the loopback interface.
    Udp,
    /// UDP with acknowledgements past the relay, so that a sender does not send more than a relay can take.
    PacedUdp,
}

/// All that carry streams, zerosock first.
pub(crate) const ALL: [Contestant; 6] = [
    Contestant::Ours,
    Contestant::Unix,
    Contestant::Tcp,
    Contestant::Pipe,
    Contestant::Iceoryx2,
    Contestant::Bare,
];

/// The worker program of a contestant and the arguments before the order.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) path: PathBuf,
    pub(crate) before: Vec<OsString>,
}

impl Contestant {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Contestant::Ours | Contestant::Release(_) => "zerosock",
            Contestant::Unix => "unix",
            Contestant::Tcp => "tcp",
            Contestant::Pipe => "pipe",
            Contestant::Iceoryx2 => "iceoryx2",
            Contestant::Bare => "bare",
            Contestant::Datagrams => "datagrams",
            Contestant::Udp => "udp",
            Contestant::PacedUdp => "paced-udp",
        }
    }

    /// Name in the tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Contestant::Ours => "zerosock",
            Contestant::Release(binary) => binary.title(),
            Contestant::Unix => "Unix stream",
            Contestant::Tcp => "TCP loopback",
            Contestant::Pipe => "pipe",
            Contestant::Iceoryx2 => "iceoryx2 0.10",
            Contestant::Bare => "bare loop",
            Contestant::Datagrams => "zerosock",
            Contestant::Udp | Contestant::PacedUdp => "UDP loopback",
        }
    }

    /// Whether the contestant can wait in this way: kernel sockets sleep, shared memory without a
    /// kernel object spins.
    pub(crate) fn waits(self, wait: Wait) -> bool {
        match self {
            Contestant::Ours | Contestant::Release(_) | Contestant::Datagrams => true,
            Contestant::Unix
            | Contestant::Tcp
            | Contestant::Pipe
            | Contestant::Udp
            | Contestant::PacedUdp => wait == Wait::Sleep,
            Contestant::Iceoryx2 | Contestant::Bare => wait == Wait::Spin,
        }
    }

    /// Number of worker processes of a pair: one for the ceiling, which has two threads.
    pub(crate) fn processes(self) -> usize {
        match self {
            Contestant::Bare => 1,
            _ => 2,
        }
    }

    /// Path of its program, or why there is none.
    pub(crate) fn program(self) -> Result<Program, String> {
        if self == Contestant::Iceoryx2 {
            return iceoryx2::find().map(|path| Program {
                path,
                before: Vec::new(),
            });
        }
        let binary = match self {
            Contestant::Release(binary) => binary,
            _ => Binary::OWN,
        };
        Ok(Program {
            path: binary.path()?,
            before: vec![binary.worker().into()],
        })
    }
}

/// Main function of a worker that is this program. The arguments are the order.
pub(crate) fn work(order: &Order) -> Result<(), Fault> {
    if order.peer == Contestant::Bare.name() {
        return worker::work_with(|| bare::run(order));
    }
    worker::pin(order.cpu)?;
    for datagrams in [Contestant::Datagrams, Contestant::Udp] {
        if order.peer == datagrams.name() {
            return datagrams::work(order, datagrams == Contestant::Datagrams);
        }
    }
    if order.peer == Contestant::PacedUdp.name() {
        return paced_udp::work(order);
    }
    if order.peer == vsock::NAME {
        return worker::work_alone(|| vsock::run(order));
    }
    if order.peer == ours::IN_GUEST {
        return worker::work_alone(|| ours::run_in_guest(order));
    }
    let find = |contestant: &Contestant| contestant.name() == order.peer;
    match ALL.into_iter().find(find) {
        Some(Contestant::Ours) => ours::work(order),
        Some(Contestant::Unix) => worker::work(&mut unix::join(order)?, order),
        Some(Contestant::Tcp) => worker::work(&mut tcp::join(order)?, order),
        Some(Contestant::Pipe) => worker::work(&mut pipe::join(order)?, order),
        _ => Err(format!("peer {}: not a part of this program", order.peer)),
    }
}
