//! The host's side of the agent: sends commands and receives replies, several at once.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use zerosock_cli::vm::qemu::{self, Control};

use super::guest;
use super::protocol::{Command, FromGuest, Outcome, READ_REPORT, Request, Socket};

/// Most bytes of commands that the guest's serial line may hold. User-mode Linux stops reading its line for good
/// when its terminal's buffer of 4096 bytes is nearly full.
const MAX_UNREAD: usize = 3072;

/// A guest under QEMU that runs the agent.
pub type Guest = qemu::Guest<Remote>;

/// The arguments with which init starts the agent.
pub fn agent(tty: &str) -> String {
    format!("{} agent --tty {tty}", guest::NAME)
}

/// Why a command has no outcome.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The guest has ended or rebooted meanwhile.
    #[error("the guest went away during {0}")]
    Gone(String),
    /// It did not answer.
    #[error("no answer from the guest within {1:?} to {0}")]
    TimedOut(String, Duration),
    /// It did not understand the command.
    #[error("the guest refuses {0}: {1}")]
    Refused(String, String),
}

/// The agent of one guest. Clones speak to the same agent.
#[derive(Clone)]
pub struct Remote(Arc<Shared>);

struct Shared {
    writer: Mutex<Box<dyn Write + Send>>,
    next: AtomicU64,
    state: Mutex<State>,
    booted: Condvar,
    read: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of the agent's hellos, and the release in the last one.
    boots: u32,
    release: String,
    gone: bool,
    /// Bytes written that the agent has not reported as read.
    unread: usize,
    waiting: HashMap<u64, Sender<Result<Outcome, String>>>,
}

/// A pending command.
pub struct Pending {
    what: String,
    answer: Receiver<Result<Outcome, String>>,
}

impl Remote {
    /// Uses a pair of streams; a thread reads replies.
    pub fn new(reader: impl Read + Send + 'static, writer: impl Write + Send + 'static) -> Remote {
        let remote = Remote(Arc::new(Shared {
            writer: Mutex::new(Box::new(writer)),
            next: AtomicU64::new(1),
            state: Mutex::default(),
            booted: Condvar::new(),
            read: Condvar::new(),
        }));
        let shared = remote.0.clone();
        thread::spawn(move || shared.read(reader));
        remote
    }

    /// Waits until the guest has booted `boots` times; returns its kernel's release.
    pub fn wait_for_boot(&self, boots: u32, timeout: Duration) -> Option<String> {
        let deadline = Instant::now() + timeout;
        let mut state = self.0.state();
        while state.boots < boots && !state.gone {
            let left = deadline.checked_duration_since(Instant::now())?;
            state = self
                .0
                .booted
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        (state.boots >= boots).then(|| state.release.clone())
    }

    /// How often the guest has booted.
    pub fn boots(&self) -> u32 {
        self.0.state().boots
    }

    /// Whether the line to the guest has ended.
    pub fn is_gone(&self) -> bool {
        self.0.state().gone
    }

    /// Sends a command without waiting.
    pub fn start(&self, command: Command) -> Pending {
        let what = format!("{command:?}");
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = channel();
        let request = Request { id, command };
        let mut line = serde_json::to_vec(&request).unwrap_or_default();
        line.push(b'\n');
        let mut writer = self.0.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = |state: &mut State| {
            !state.gone && state.unread >= READ_REPORT && state.unread + line.len() > MAX_UNREAD
        };
        let waited = self.0.read.wait_while(self.0.state(), is_full);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.unread += line.len();
        if !state.gone {
            state.waiting.insert(id, sender);
        }
        drop(state);
        if writer
            .write_all(&line)
            .and_then(|()| writer.flush())
            .is_err()
        {
            self.0.state().waiting.remove(&id);
        }
        Pending { what, answer }
    }

    /// Sends a command and waits for its outcome.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub fn run(&self, command: Command, timeout: Duration) -> Result<Outcome, RemoteError> {
        self.start(command).wait(timeout)
    }

    /// The socket of a [`Command::Connect`], [`Command::Listen`] or [`Command::Accept`] that
    /// must succeed.
    ///
    /// # Errors
    /// Also when the guest's system refused.
    pub fn socket(&self, command: Command, timeout: Duration) -> Result<Socket, RemoteError> {
        self.start(command).socket(timeout)
    }
}

impl Control for Remote {
    fn new(line: UnixStream) -> io::Result<Remote> {
        Ok(Remote::new(line.try_clone()?, line))
    }

    fn wait_for_boot(&mut self, timeout: Duration) -> Option<String> {
        Remote::wait_for_boot(self, 1, timeout)
    }

    fn is_gone(&self) -> bool {
        Remote::is_gone(self)
    }
}

impl Pending {
    /// Waits for the outcome.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub fn wait(self, timeout: Duration) -> Result<Outcome, RemoteError> {
        match self.answer.recv_timeout(timeout) {
            Ok(Ok(outcome)) => Ok(outcome),
            Ok(Err(text)) => Err(RemoteError::Refused(self.what, text)),
            Err(RecvTimeoutError::Timeout) => Err(RemoteError::TimedOut(self.what, timeout)),
            Err(RecvTimeoutError::Disconnected) => Err(RemoteError::Gone(self.what)),
        }
    }

    /// Waits for the socket in the outcome, which must be there.
    ///
    /// # Errors
    /// Also when the guest's system refused.
    pub fn socket(self, timeout: Duration) -> Result<Socket, RemoteError> {
        let what = self.what.clone();
        let outcome = self.wait(timeout)?;
        outcome.socket.ok_or_else(|| {
            RemoteError::Refused(what, outcome.errno.unwrap_or_else(|| "no socket".into()))
        })
    }
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, reader: impl Read) {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while matches!(reader.read_until(b'\n', &mut line), Ok(n) if n > 0) {
            match serde_json::from_slice(&line) {
                Ok(FromGuest::Hello { release }) => {
                    let mut state = self.state();
                    state.boots += 1;
                    state.release = release;
                    state.unread = 0;
                    // Commands that were pending before the reboot get no reply.
                    state.waiting.clear();
                    self.booted.notify_all();
                    self.read.notify_all();
                }
                Ok(FromGuest::Read { bytes }) => {
                    let mut state = self.state();
                    state.unread = state.unread.saturating_sub(bytes);
                    self.read.notify_all();
                }
                Ok(FromGuest::Reply { id, outcome }) => {
                    if let Some(sender) = self.state().waiting.remove(&id) {
                        let _ = sender.send(outcome);
                    }
                }
                // Firmware and kernel may write to the line before the agent does.
                Err(_) => {}
            }
            line.clear();
        }
        let mut state = self.state();
        state.gone = true;
        state.waiting.clear();
        self.booted.notify_all();
        self.read.notify_all();
    }
}
