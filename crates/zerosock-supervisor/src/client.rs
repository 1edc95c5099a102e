//! The worker process's side: takes the entries over and sends batches.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketType, sockopt};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::message::{Limits, MAX_DATAGRAM, Operation, decode, encode};
use crate::store::Store;
use crate::{Error, socket};

/// Environment variable that the supervisor sets to 1 in the worker process.
pub(crate) const SUPERVISED: &str = "ZEROSOCK_SUPERVISED";

/// Entries with this prefix are for a process that takes over from one that has stopped for it
/// ([`Client::hand_over`]). The successor of one that died does not get them.
pub const HANDOVER_PREFIX: &str = "handover/";

/// An entry that a predecessor, or the supervisor, has left.
#[derive(Debug)]
pub struct Entry {
    /// Its key.
    pub key: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its descriptors, close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Operations that the supervisor executes as a whole or not at all.
#[derive(Clone, Debug, Default)]
pub struct Batch<'a> {
    operations: Vec<Operation<'a>>,
    fds: Vec<BorrowedFd<'a>>,
}

impl<'a> Batch<'a> {
    /// Inserts an entry at the end, in the place of one with the same key.
    pub fn put(mut self, key: &'a str, bytes: &'a [u8], fds: &[BorrowedFd<'a>]) -> Batch<'a> {
        self.fds.extend(fds);
        self.push(Operation::Put(key, bytes, fds.len()))
    }

    /// Removes the entry with the key `prefix`, and all entries with keys that continue it after a slash.
    pub fn remove(self, prefix: &'a str) -> Batch<'a> {
        self.push(Operation::Remove(prefix))
    }

    /// Moves an entry, which must exist, to the end, with another key, in the place of one with that key.
    pub fn rename(self, from: &'a str, to: &'a str) -> Batch<'a> {
        self.push(Operation::Rename(from, to))
    }

    /// Writes to the first descriptor of an entry, which must exist, after all other operations are done. If
    /// that is no Unix stream socket nothing is written; if it does not take all bytes it is shut down.
    pub fn write(self, key: &'a str, bytes: &'a [u8]) -> Batch<'a> {
        self.push(Operation::Write(key, bytes))
    }

    fn push(mut self, operation: Operation<'a>) -> Batch<'a> {
        self.operations.push(operation);
        self
    }
}

/// The connection to the supervisor, for all threads. A call waits while the supervisor has not received
/// earlier messages.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    /// What the supervisor has. Locked while a batch is sent, so that both execute batches in one order.
    store: Mutex<Store<()>>,
}

impl Client {
    /// Whether a supervisor has started this process.
    pub fn is_supervised() -> bool {
        std::env::var_os(SUPERVISED).is_some()
    }

    /// Takes the socket from standard input, puts /dev/null there, and receives all entries in the order of
    /// their insertion. From then on the kernel kills this process when the supervisor dies,
    /// until it changes its user.
    ///
    /// # Errors
    /// There is no supervisor, or a system call fails.
    pub fn take() -> Result<(Client, Vec<Entry>), Error> {
        let stdin = io::stdin();
        if sockopt::socket_type(&stdin) != Ok(SocketType::SEQPACKET) {
            return Err(Error::NoSupervisor);
        }
        let socket = rustix::io::fcntl_dupfd_cloexec(&stdin, 3).map_err(io::Error::from)?;
        send_message(&socket, &[Operation::Take], &[])?;
        rustix::stdio::dup2_stdin(File::open("/dev/null")?).map_err(io::Error::from)?;
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)?;
        let (client, entries) = Client::receive(socket)?;
        // It may have ended before the call above.
        match client.wait_for_supervisor_end(Some(Duration::ZERO))? {
            true => Err(Error::NoSupervisor),
            false => Ok((client, entries)),
        }
    }

    fn receive(socket: OwnedFd) -> Result<(Client, Vec<Entry>), Error> {
        let unlimited = Limits {
            entries: u64::MAX,
            bytes: u64::MAX,
            descriptors: u64::MAX,
        };
        let (mut store, mut entries) = (Store::new(unlimited), Vec::new());
        let mut buffer = vec![0; MAX_DATAGRAM];
        loop {
            let mut fds = Vec::new();
            let received = socket::receive(&socket, &mut buffer, &mut fds, RecvFlags::empty());
            let message = &buffer[..received.map_err(io::Error::from)?];
            if message.is_empty() {
                return Err(Error::NoSupervisor);
            }
            match decode(message, fds.len())?[..] {
                [Operation::End(limits)] => {
                    store.limits = limits;
                    return Ok((
                        Client {
                            socket,
                            store: Mutex::new(store),
                        },
                        entries,
                    ));
                }
                [put @ Operation::Put(key, bytes, count)] => {
                    store.apply(&[put], vec![(); count], |_| Ok(()))?;
                    entries.push(Entry {
                        key: key.to_owned(),
                        bytes: bytes.to_vec(),
                        fds,
                    });
                }
                _ => return Err(Error::Invalid("not a message of a supervisor")),
            }
        }
    }

    /// Sends a batch. Once this has returned, the supervisor executes it whatever becomes of this process.
    ///
    /// # Errors
    /// The batch exceeds a bound, the store cannot execute it, or the supervisor has ended.
    pub fn send(&self, batch: &Batch<'_>) -> Result<(), Error> {
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        store.apply(&batch.operations, vec![(); batch.fds.len()], |_| {
            self.send_message(&batch.operations, &batch.fds)
        })
    }

    /// Reports progress.
    ///
    /// # Errors
    /// The supervisor has ended.
    pub fn alive(&self) -> Result<(), Error> {
        self.send_message(&[Operation::Alive], &[])
    }

    /// Notifies the service manager of states, one a line: READY=1, RELOADING=1, MONOTONIC_USEC, STOPPING=1
    /// and STATUS.
    ///
    /// # Errors
    /// Other states, or the supervisor has ended.
    pub fn notify(&self, text: &str) -> Result<(), Error> {
        self.send_message(&[Operation::Notify(text)], &[])
    }

    /// Says that this process ends on purpose: the supervisor ends with its exit code.
    ///
    /// # Errors
    /// The supervisor has ended.
    pub fn stopping(&self) -> Result<(), Error> {
        self.send_message(&[Operation::Stopping], &[])
    }

    /// Says that this process serves from now on: one that has [stopped](Self::hand_over) for it is killed, and
    /// the entries below [`HANDOVER_PREFIX`] are removed. To be called once, when nothing can fail any more.
    ///
    /// # Errors
    /// The supervisor has ended.
    pub fn take_over(&self) -> Result<(), Error> {
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        store.apply(&[Operation::Remove(HANDOVER_PREFIX)], Vec::new(), |_| {
            self.send_message(&[Operation::TakeOver], &[])
        })
    }

    /// Says that this process has stopped, and that all entries are there for the process that takes over.
    /// Returns if that one does not; otherwise this process is killed. To be called on SIGUSR2.
    ///
    /// # Errors
    /// The supervisor has ended.
    pub fn hand_over(&self) -> Result<(), Error> {
        self.send_message(&[Operation::HandedOver], &[])?;
        let mut buffer = [0; 64];
        let received = socket::receive(
            &self.socket,
            &mut buffer,
            &mut Vec::new(),
            RecvFlags::empty(),
        );
        let received = received.map_err(io::Error::from)?;
        match buffer.get(..received) {
            None | Some([]) => Err(Error::NoSupervisor),
            Some(message) => match decode(message, 0)?[..] {
                [Operation::Resume] => Ok(()),
                _ => Err(Error::Invalid("not a message of a supervisor")),
            },
        }
    }

    /// Waits until the supervisor has ended, or for a time. Returns whether it has.
    ///
    /// # Errors
    /// Errors of poll(2).
    pub fn wait_for_supervisor_end(&self, limit: Option<Duration>) -> io::Result<bool> {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        // After the entries the supervisor sends nothing but the answer to `hand_over`.
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        Ok(poll(&mut fds, limit.as_ref())? > 0)
    }

    fn send_message(&self, message: &[Operation<'_>], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        send_message(&self.socket, message, fds)
    }
}

fn send_message(
    socket: &OwnedFd,
    message: &[Operation<'_>],
    fds: &[BorrowedFd<'_>],
) -> Result<(), Error> {
    match socket::send(socket, &encode(message)?, fds, SendFlags::empty()) {
        Err(Errno::PIPE | Errno::CONNRESET) => Err(Error::NoSupervisor),
        result => Ok(result.map_err(io::Error::from)?),
    }
}

/// Readable when the supervisor has ended.
impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
