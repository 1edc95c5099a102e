//! The keeper: a process that pins the pages of attachments, and does nothing else. It outlives the agent, so that no page
//! that the host may still write goes back to the guest's kernel when the agent ends in any way.
//!
//! The agent sends it files over a Unix socket (SOCK_SEQPACKET) with a path, where the next agent finds it again. It ends
//! when it has neither an agent nor a pin.
//!
//! This file has the agent's side, `process` the keeper's. The keeper is the same program as the agent, which
//! [`KeeperEntry::enter`] makes a keeper.
//!
//! # Invariants
//! - Pages stay pinned until the agent says that the host has ended their attachment.
//! - It has one agent at a time.
//! - It never reads or writes a page.

mod process;

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::net::{Shutdown, SocketType, shutdown};
use zerosock_ring::Extent;
use zerosock_sys::socket_file::{self, SocketFileOptions};
use zerosock_sys::{fd_passing, socket_path, wait_ready};

pub use self::process::KeeperEntry;
use self::process::{BUSY, COMMAND, DONE, EXTENT_LEN, MAX_ANSWER, OP_PIN, OP_UNPIN};
use crate::control::guest::wire::AttachmentId;

/// Time limit of a request; pinning many pages takes time.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Times that an agent looks for a keeper: one may end, or start, meanwhile.
const ATTEMPTS: usize = 5;

/// Why the keeper has not done what the agent needs.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// It has another agent.
    #[error(
        "another `zerosock guest`, or a program in its place, runs in this guest; end it first"
    )]
    Busy,
    /// It has refused, with this text.
    #[error("{0}")]
    Refused(String),
    /// It has ended or does not answer.
    #[error("the keeper, which pins pages, does not answer: {0}")]
    Gone(io::Error),
    /// It cannot be started or found.
    #[error("cannot start the keeper, which pins pages: {0}")]
    Start(io::Error),
}

/// The agent's connection to its keeper. A hang-up of it is the end of the keeper.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
    /// Locked from a request to its answer.
    request: Mutex<()>,
}

impl Keeper {
    /// Connects to the keeper with this socket, or starts one.
    ///
    /// # Errors
    /// See [`KeeperError`].
    pub fn find_or_start(path: &Path, _: KeeperEntry) -> Result<Keeper, KeeperError> {
        let mut last = io::ErrorKind::TimedOut.into();
        for _ in 0..ATTEMPTS {
            let found = socket_path::connect(path, SocketType::SEQPACKET, TIMEOUT);
            let greeted = found.and_then(|socket| {
                let mut answer = [0; MAX_ANSWER];
                let len = receive(&socket, &mut answer)?;
                Ok((socket, answer.first().copied().filter(|_| len > 0)))
            });
            match greeted {
                Ok((_, Some(BUSY))) => return Err(KeeperError::Busy),
                Ok((socket, Some(_))) => {
                    let request = Mutex::default();
                    return Ok(Keeper { socket, request });
                }
                Ok((_, None)) => {}
                Err(error) => last = error,
            }
            match listen(path) {
                Ok(listener) => start(listener).map_err(KeeperError::Start)?,
                // One has started or still runs.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
                Err(error) => return Err(KeeperError::Start(error)),
            }
        }
        Err(KeeperError::Start(last))
    }

    /// Pins all pages of a file, and returns where they lie.
    ///
    /// # Errors
    /// See [`KeeperError`].
    pub fn pin(&self, id: AttachmentId, file: impl AsFd) -> Result<Vec<Extent>, KeeperError> {
        let extents = self.request(OP_PIN, id, &[file.as_fd()])?;
        let extents = extents.chunks_exact(EXTENT_LEN).map(|bytes| {
            let word = |at: usize| bytes.get(at..).and_then(<[u8]>::first_chunk);
            let [addr, len] = [0, 8].map(|at| word(at).map_or(0, |it| u64::from_le_bytes(*it)));
            Extent { addr, len }
        });
        Ok(extents.collect())
    }

    /// Unpins the pages of an attachment that the host has ended.
    ///
    /// # Errors
    /// See [`KeeperError`].
    pub fn unpin(&self, id: AttachmentId) -> Result<(), KeeperError> {
        self.request(OP_UNPIN, id, &[]).map(drop)
    }

    fn request(
        &self,
        op: u8,
        id: AttachmentId,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<u8>, KeeperError> {
        let _one = self.request.lock().unwrap_or_else(PoisonError::into_inner);
        let mut answer = [0; MAX_ANSWER];
        let request = [&[op][..], &id.0].concat();
        let len = fd_passing::send(&self.socket, &[IoSlice::new(&request)], fds)
            .and_then(|_| receive(&self.socket, &mut answer))
            .map_err(|error| {
                // A late answer must not be taken for that of the next request.
                let _ = shutdown(&self.socket, Shutdown::Both);
                KeeperError::Gone(error)
            })?;
        match answer.get(..len).and_then(<[u8]>::split_first) {
            Some((&DONE, rest)) => Ok(rest.to_vec()),
            Some((_, text)) => Err(KeeperError::Refused(
                String::from_utf8_lossy(text).into_owned(),
            )),
            None => Err(KeeperError::Gone(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

impl AsFd for Keeper {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Receives a message without descriptors; 0 is the end of the connection.
fn receive(socket: impl AsFd, answer: &mut [u8]) -> io::Result<usize> {
    if wait_ready(&socket, PollFlags::IN, Some(TIMEOUT))?.is_empty() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    fd_passing::recv(&socket, answer, &mut Vec::new()).map(|received| received.bytes)
}

/// Binds the socket of a keeper, which takes descriptors from this user only. Its file stays: the next keeper replaces it.
fn listen(path: &Path) -> io::Result<OwnedFd> {
    let options = SocketFileOptions {
        kind: SocketType::SEQPACKET,
        mode: None,
        gid: None,
        backlog: 4,
        refuse_rights: false,
        // The agent itself connects to it.
        reserved: false,
        lock_wait: Duration::from_secs(1),
    };
    let (socket, file) = socket_file::bind(path, options)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    // Dropping it would remove the file.
    std::mem::forget(file);
    Ok(socket)
}

/// Starts this program as a keeper with this listener. A thread waits for its end, so that no zombie is left.
fn start(listener: OwnedFd) -> io::Result<()> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("zerosock").arg(COMMAND).current_dir("/");
    command
        .stdin(listener)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut keeper = command.spawn()?;
    thread::spawn(move || keeper.wait());
    Ok(())
}

#[cfg(test)]
mod tests;
