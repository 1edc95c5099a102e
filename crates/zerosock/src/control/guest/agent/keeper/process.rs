//! The process of the keeper.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{SocketFlags, accept_with};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use zerosock_ring::Extent;
use zerosock_sys::fd_passing;
use zerosock_sys::hugetlbfs::{HugeMapping, HugePageError};
use zerosock_sys::pagemap::{self, PagemapError};
use zerosock_sys::pin::{Pin, PinError};

use crate::control::guest::wire::{AttachmentId, MAX_EXTENTS};

/// The first argument of a keeper.
pub(super) const COMMAND: &str = "guest-keeper";

pub(super) const OP_PIN: u8 = 1;
pub(super) const OP_UNPIN: u8 = 2;
const REQUEST_LEN: usize = 1 + size_of::<AttachmentId>();
/// The first byte of an answer, and what follows: extents, or a text.
pub(super) const DONE: u8 = 0;
const FAILED: u8 = 1;
/// The first message to an agent, if the keeper has another one; else it is an empty [`DONE`].
pub(super) const BUSY: u8 = 2;
pub(super) const EXTENT_LEN: usize = 16;
pub(super) const MAX_ANSWER: usize = 1 + EXTENT_LEN * MAX_EXTENTS;

/// How long a keeper without pins waits for an agent.
const UNUSED: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Shows that this program is a keeper when it is started as one.
#[derive(Copy, Clone, Debug)]
pub struct KeeperEntry(pub(super) ());

impl KeeperEntry {
    /// In a process that [`Agent::start`](super::super::Agent::start) has started to pin pages: pins them, and does not
    /// return. Otherwise returns at once. Call it first in `main`: the process runs the same program as its own.
    pub fn enter() -> KeeperEntry {
        let named = std::env::args_os().nth(1).is_some_and(|it| it == COMMAND);
        if named && socket_acceptconn(io::stdin()).unwrap_or(false) {
            std::process::exit(main().is_err().into());
        }
        KeeperEntry(())
    }
}

/// The keeper's process. Its listener is its standard input.
fn main() -> io::Result<()> {
    let listener = io::stdin().as_fd().try_clone_to_owned()?;
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        // The agent ends it; what ends the agent is not to end it, too.
        signal_hook::flag::register(signal, Arc::default())?;
    }
    let _ = rustix::process::setsid();
    // The system is to take memory from all others first.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    serve(&listener)
}

/// Serves one agent after the other.
pub(super) fn serve(listener: &OwnedFd) -> io::Result<()> {
    let mut pins = HashMap::new();
    let mut agent: Option<OwnedFd> = None;
    loop {
        let mut watched = vec![PollFd::new(listener, PollFlags::IN)];
        watched.extend(agent.iter().map(|it| PollFd::new(it, PollFlags::IN)));
        let limit = (agent.is_none() && pins.is_empty()).then_some(&UNUSED);
        let ready = match poll(&mut watched, limit) {
            Ok(0) => return Ok(()),
            Ok(_) => watched.iter().map(|it| !it.revents().is_empty()),
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        };
        let ready: Vec<bool> = ready.collect();
        // The end of one agent comes before the beginning of the next.
        if ready.get(1) == Some(&true) && !agent.as_ref().is_some_and(|it| handle(it, &mut pins)) {
            agent = None;
            if pins.is_empty() {
                return Ok(());
            }
        } else if ready.first() == Some(&true) {
            greet(listener, &mut agent);
        }
    }
}

/// Accepts an agent if there is no other one.
fn greet(listener: &OwnedFd, agent: &mut Option<OwnedFd>) {
    let Ok(socket) = accept_with(listener, SocketFlags::CLOEXEC) else {
        return;
    };
    let greeting = if agent.is_some() { BUSY } else { DONE };
    let sent = fd_passing::send(&socket, &[IoSlice::new(&[greeting])], &[]);
    if agent.is_none() && sent.is_ok() {
        *agent = Some(socket);
    }
}

/// Why pages are not pinned.
#[derive(Debug, thiserror::Error)]
enum NotPinned {
    #[error(transparent)]
    Map(#[from] HugePageError),
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error(transparent)]
    Pagemap(#[from] PagemapError),
    #[error(
        "the pages lie in {0} places, at most {MAX_EXTENTS} can be registered: free memory, or take fewer pages"
    )]
    Scattered(usize),
    #[error("not a request of this version")]
    BadRequest,
}

/// Handles a request. False: the agent is gone.
fn handle(agent: &OwnedFd, pins: &mut HashMap<[u8; 16], Pin>) -> bool {
    let (mut request, mut fds) = ([0; REQUEST_LEN], Vec::new());
    match fd_passing::recv(agent, &mut request, &mut fds) {
        Ok(received) if received.bytes == REQUEST_LEN => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
        _ => return false,
    }
    let id = request.last_chunk::<16>().copied().unwrap_or_default();
    let op = request.first();
    let done = match (op, fds.pop()) {
        (Some(&OP_PIN), Some(file)) => pin(&file).map(|(pin, extents)| {
            pins.insert(id, pin);
            extents
        }),
        (Some(&OP_UNPIN), None) => {
            pins.remove(&id);
            Ok(Vec::new())
        }
        _ => Err(NotPinned::BadRequest),
    };
    let (first, rest) = match done {
        Ok(extents) => {
            let words = extents.iter().flat_map(|extent| [extent.addr, extent.len]);
            (DONE, words.flat_map(u64::to_le_bytes).collect())
        }
        Err(error) => (FAILED, error.to_string().into_bytes()),
    };
    let answer = [&[first][..], &rest].concat();
    let sent = fd_passing::send(agent, &[IoSlice::new(&answer)], &[]).is_ok();
    if !sent && op == Some(&OP_PIN) {
        // The agent, which does not learn of the pin, has not named the pages to the host.
        pins.remove(&id);
    }
    sent
}

fn pin(file: impl AsFd) -> Result<(Pin, Vec<Extent>), NotPinned> {
    let mapping = HugeMapping::new(file)?;
    let pin = Pin::new(&mapping)?;
    let extents = pagemap::extents(&mapping, &pin)?;
    match extents.len() {
        0..=MAX_EXTENTS => Ok((pin, extents)),
        count => Err(NotPinned::Scattered(count)),
    }
}
