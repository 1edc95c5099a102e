//! This process as the worker process of a supervisor: what it keeps for its successor, and what its
//! predecessor has left.
//!
//! # Entries
//! - `listen/N`: a listening socket, by its number in the kernel.
//! - `vm/CID/state`: the memory of the device that outlives this process.
//! - `handover/CID/PAIR`, for a process that takes over from one that has paused: what it has saved of a
//!   queue pair (`SavedQueuePair`), in a memory file; `handover/CID/PAIR/N`: the descriptors of it.
//! - `vm/CID/front`: the connection of the front-end; `vm/CID/front/pending` and
//!   `vm/CID/front/REQUEST/INDEX`: its journal (`journal`).
//!
//! # Invariants
//! - The process works without a supervisor, too: then nothing is kept.
//! - What a predecessor has left is input like that of a peer: names that are not of this form are
//!   ignored, and everything else is checked where it is used.

mod connection;
mod journal;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::fstat;
use rustix::time::{ClockId, clock_gettime};
use tracing::{error, info};
use zerosock::daemon::{Daemon, Keep, SavedQueuePair, Succession};
use zerosock::forward::ListenAddress;
use zerosock_supervisor::{
    Batch, Client, Config, Entry, Error, HANDOVER_PREFIX, MAX_FDS, Supervisor,
};
use zerosock_sys::{PeerFd, memfd};
use zerosock_vhost_user::journal::{Record, RestoredFrontend, VmJournal};

use self::connection::send;
pub(crate) use self::connection::supervisor;
use self::journal::SupervisorJournal;
use crate::failure::Failure;

/// What a predecessor has left.
#[derive(Debug, Default)]
pub(crate) struct Predecessor {
    /// Listening sockets: its own, and those that the service manager has passed.
    pub(crate) listeners: Vec<Listener>,
    vms: BTreeMap<u32, PredecessorVm>,
    /// When it has paused for this process, in nanoseconds of the monotonic clock.
    paused: Option<u64>,
}

/// A listening socket that the service manager has passed or that this program has made.
#[derive(Debug)]
pub(crate) struct Listener {
    /// The service manager's name for it.
    pub(crate) name: String,
    /// The address to which it is bound; an empty path if that is none.
    pub(crate) on: ListenAddress,
    pub(crate) socket: OwnedFd,
    /// It, and the file at its path, was made by a predecessor of this process.
    pub(crate) is_made: bool,
}

#[derive(Debug, Default)]
struct PredecessorVm {
    state: Option<OwnedFd>,
    front: Option<PeerFd>,
    pending: Option<Record>,
    kept: Vec<Record>,
    saved: BTreeMap<u16, SavedPair>,
}

/// What a paused process has saved of a queue pair.
#[derive(Debug, Default)]
struct SavedPair {
    bytes: Vec<u8>,
    /// By their number.
    fds: BTreeMap<u32, Vec<OwnedFd>>,
}

/// How long a worker process may show no progress: longer than a reload takes.
const ALIVE_LIMIT: Duration = Duration::from_secs(30);

/// Most bytes of a queue pair's saved connections: more than a device may copy for stalled ones.
const MAX_SAVED: u64 = 1 << 30;

/// A predecessor has left something, and this process does not serve yet.
static IS_TAKING_OVER: AtomicBool = AtomicBool::new(false);

/// Whether an end of this process now must leave everything to another successor.
pub(crate) fn is_taking_over() -> bool {
    IS_TAKING_OVER.load(Ordering::Relaxed)
}

/// This process serves: what ends from now on, ends on purpose.
pub(crate) fn has_taken_over() {
    IS_TAKING_OVER.store(false, Ordering::Relaxed);
}

/// Connects to the supervisor of this process, if it has one, and takes what a predecessor has left. To
/// be called once, before the first thread starts.
pub(crate) fn begin() -> Result<Predecessor, Error> {
    if !Client::is_supervised() {
        return Ok(Predecessor::default());
    }
    // The name of an executable that is open is that of its descriptor.
    let _ = rustix::thread::set_name(c"zerosock");
    let (client, entries) = Client::take()?;
    // Without unwinding, which would close the connections of all VMs.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
    let mut predecessor = Predecessor::default();
    entries.into_iter().for_each(|entry| predecessor.add(entry));
    predecessor.check()?;
    client.take_over()?;
    connection::set(client);
    let has_predecessor =
        !predecessor.vms.is_empty() || predecessor.listeners.iter().any(|it| it.is_made);
    IS_TAKING_OVER.store(has_predecessor, Ordering::Relaxed);
    Ok(predecessor)
}

/// Ends this process at once, if it has a supervisor, without closing any connection.
pub(crate) fn leave_to_successor() {
    if supervisor().is_some() {
        error!("a worker thread has ended: another process takes over");
        std::process::abort();
    }
}

/// Pauses the daemon, and lets another process continue what it serves; the daemon goes on if that one does
/// not. Without a supervisor nothing is done.
pub(crate) fn hand_over(daemon: &Daemon) {
    let Some(client) = supervisor() else {
        return;
    };
    let keep: Keep = Arc::new(|cid, pair, bytes, fds| {
        let key = format!("{HANDOVER_PREFIX}{}/{pair}", cid.get());
        let file = memfd::create("zerosock-saved", bytes.len() as u64, false);
        let written = file.and_then(|file| {
            File::from(file.try_clone()?).write_all_at(bytes, 0)?;
            Ok(file)
        });
        match written {
            Ok(file) => drop(send(
                &key,
                &Batch::default().put(&key, &[], &[file.as_fd()]),
            )),
            Err(error) => error!(key, %error, "cannot save connections"),
        }
        for (number, fds) in fds.chunks(MAX_FDS).enumerate() {
            let key = format!("{key}/{number}");
            send(&key, &Batch::default().put(&key, &[], fds));
        }
    });
    let begin = Instant::now();
    let key = format!("{HANDOVER_PREFIX}began");
    send(&key, &Batch::default().put(&key, &now().to_le_bytes(), &[]));
    match daemon.pause(&keep) {
        Ok(_paused) => {
            if let Err(error) = client.hand_over() {
                // Another process may have taken over already.
                error!(%error, "not handed over, and the supervisor has gone");
                std::process::abort();
            }
            error!(paused = ?begin.elapsed(), "not handed over: this process goes on");
        }
        Err(error) => error!(%error, "not handed over: this process goes on"),
    }
    remove(HANDOVER_PREFIX);
}

/// Says that this process ends on purpose.
pub(crate) fn stopping() {
    if let Some(client) = supervisor() {
        // Fails if the supervisor has ended.
        let _ = client.stopping();
    }
}

/// Runs this command line in worker processes, until one of them ends on purpose; returns its exit code.
/// `passed`: the sockets of the service manager.
pub(crate) fn supervise(passed: Vec<Listener>) -> Result<i32, Failure> {
    let run = || -> Result<i32, Error> {
        let config = Config {
            alive_limit: ALIVE_LIMIT,
            upgrade: std::env::current_exe().ok(),
            ..Config::new("/proc/self/exe", std::env::args_os().collect())
        };
        let mut supervisor = Supervisor::new(config)?;
        for listener in passed {
            let (key, bytes) = (listener_key(&listener.socket), encode_listener(&listener));
            supervisor.put(&key, &bytes, vec![listener.socket])?;
        }
        Ok(supervisor.run()?)
    };
    run().map_err(|error| Failure::runtime(format_args!("the supervisor: {error}")))
}

impl Predecessor {
    fn add(&mut self, entry: Entry) {
        let Entry { key, bytes, fds } = entry;
        let parts: Vec<&str> = key.split('/').collect();
        match parts[..] {
            ["listen", _] => {
                let listener = fds.into_iter().next();
                let listener = listener.and_then(|socket| decode_listener(&bytes, socket));
                self.listeners.extend(listener);
            }
            ["handover", "began"] => {
                self.paused = bytes.try_into().ok().map(u64::from_le_bytes);
            }
            ["handover", cid, pair, ref rest @ ..] => {
                let (Ok(cid), Ok(pair)) = (cid.parse(), pair.parse()) else {
                    return;
                };
                let vm = self.vms.entry(cid).or_default();
                let saved = vm.saved.entry(pair).or_default();
                match rest {
                    [] => saved.bytes = fds.into_iter().next().map(read).unwrap_or_default(),
                    [number] => {
                        let Ok(number) = number.parse() else { return };
                        saved.fds.insert(number, fds);
                    }
                    _ => {}
                }
            }
            ["vm", cid, "state"] => {
                let Ok(cid) = cid.parse() else { return };
                self.vms.entry(cid).or_default().state = fds.into_iter().next();
            }
            ["vm", cid, "front", ref rest @ ..] => {
                let Ok(cid) = cid.parse() else { return };
                let vm = self.vms.entry(cid).or_default();
                let mut fds = fds.into_iter().map(PeerFd::from);
                match rest {
                    [] => vm.front = fds.next(),
                    ["pending"] => {
                        let fds = fds.collect();
                        vm.pending = Some(Record { bytes, fds });
                    }
                    _ => {
                        let fds = fds.collect();
                        vm.kept.push(Record { bytes, fds });
                    }
                }
            }
            _ => {}
        }
    }

    /// Checks what a paused process has saved, before it is too late to let that one go on.
    fn check(&self) -> Result<(), Error> {
        for (cid, vm) in &self.vms {
            for (pair, saved) in &vm.saved {
                let checked = SavedQueuePair::check(&saved.bytes);
                checked.map_err(|reason| {
                    let text = format!("what is saved of CID {cid}, queue pair {pair}: {reason}");
                    Error::System(io::Error::other(text))
                })?;
            }
        }
        Ok(())
    }

    /// What the VM with this CID leaves to a successor, and what a predecessor has left of it; `None`
    /// without a supervisor.
    pub(crate) fn succession(&mut self, cid: u32) -> Option<Succession> {
        supervisor()?;
        let mut vm = self.vms.remove(&cid).unwrap_or_default();
        let state = vm.state.take();
        let saved = std::mem::take(&mut vm.saved).into_iter();
        let saved = saved.map(|(pair, saved)| SavedQueuePair {
            pair,
            bytes: saved.bytes,
            fds: saved.fds.into_values().flatten().collect(),
        });
        let restored = vm.front.map(|socket| RestoredFrontend {
            socket,
            next_number: journal::random(),
            kept: vm.kept,
            pending: vm.pending,
        });
        let writer = Box::new(SupervisorJournal::new(cid));
        Some(Succession {
            journal: VmJournal { writer, restored },
            state,
            saved: saved.collect(),
            keep_state: Box::new(move |file| {
                let key = format!("vm/{cid}/state");
                send(&key, &Batch::default().put(&key, &[], &[file]));
            }),
        })
    }

    /// Drops what belongs to VMs that are not configured any more. All devices have what they continue.
    pub(crate) fn finish(self) {
        if let Some(paused) = self.paused {
            let pause = Duration::from_nanos(now().saturating_sub(paused));
            info!(?pause, "took over from another process");
        }
        for cid in self.vms.into_keys() {
            remove(&format!("vm/{cid}"));
        }
    }
}

/// Nanoseconds of the monotonic clock.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Neither is negative.
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32).as_nanos() as u64
}

/// Reads a memory file; empty if that is not possible.
fn read(file: OwnedFd) -> Vec<u8> {
    let mut bytes = Vec::new();
    let file = File::from(file);
    let start = (&file).rewind();
    match start.and_then(|()| file.take(MAX_SAVED).read_to_end(&mut bytes)) {
        Ok(_) => bytes,
        Err(_) => Vec::new(),
    }
}

/// An entry with the supervisor, which is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct KeptEntry(String);

impl Drop for KeptEntry {
    fn drop(&mut self) {
        if !is_taking_over() {
            remove(&self.0);
        }
    }
}

/// All that is kept of the VM with this CID.
pub(crate) fn keep_vm(cid: u32) -> Option<KeptEntry> {
    supervisor().map(|_| KeptEntry(format!("vm/{cid}")))
}

/// Keeps a listening socket for a successor.
pub(crate) fn keep_listener(listener: &Listener) -> Option<KeptEntry> {
    supervisor()?;
    let socket = listener.socket.as_fd();
    let key = listener_key(socket);
    let bytes = encode_listener(listener);
    send(&key, &Batch::default().put(&key, &bytes, &[socket]));
    Some(KeptEntry(key))
}

/// Drops a listening socket of a predecessor.
pub(crate) fn forget_listener(socket: OwnedFd) {
    remove(&listener_key(&socket));
    // The connections in its backlog are those of peers.
    drop(PeerFd::from(socket));
}

/// The bytes of a listener's entry: a letter for its kind, `m` if it was made by this program or `-`, its
/// name, a zero byte, and the address.
fn encode_listener(listener: &Listener) -> Vec<u8> {
    let tcp;
    let (kind, address) = match &listener.on {
        ListenAddress::Tcp(address) => {
            tcp = address.to_string();
            (b't', tcp.as_bytes())
        }
        ListenAddress::Unix(path) => (b'u', path.as_os_str().as_bytes()),
        ListenAddress::UnixSeqpacket(path) => (b'p', path.as_os_str().as_bytes()),
    };
    let made = if listener.is_made { b'm' } else { b'-' };
    [&[kind, made], listener.name.as_bytes(), &[0], address].concat()
}

fn decode_listener(bytes: &[u8], socket: OwnedFd) -> Option<Listener> {
    let (&[kind, made], rest) = bytes.split_first_chunk()?;
    let end = rest.iter().position(|&byte| byte == 0)?;
    let (name, address) = (rest.get(..end)?, rest.get(end + 1..)?);
    let path = || PathBuf::from(OsStr::from_bytes(address));
    let on = match kind {
        b't' => ListenAddress::Tcp(std::str::from_utf8(address).ok()?.parse().ok()?),
        b'u' => ListenAddress::Unix(path()),
        b'p' => ListenAddress::UnixSeqpacket(path()),
        _ => return None,
    };
    Some(Listener {
        name: String::from_utf8(name.to_vec()).ok()?,
        on,
        socket,
        is_made: made == b'm',
    })
}

fn listener_key(socket: impl AsFd) -> String {
    // Each socket of the system has its own. The call fails for no open descriptor.
    let number = fstat(socket).map_or(0, |status| status.st_ino);
    format!("listen/{number}")
}

fn remove(key: &str) {
    send(key, &Batch::default().remove(key));
}
