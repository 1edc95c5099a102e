//! Transfers bytes: from standard input to the connection, from the connection to standard output.
//!
//! Each direction is a thread with blocking calls, so that neither waits for the other and no
//! shared descriptor (standard input may be a shell's terminal) becomes non-blocking. The caller's
//! thread waits for both, enforces the time limits, and shows progress. A thread that is still
//! blocked in a read when everything else has ended ends with the process.

use std::io::{self, PipeReader};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::Shutdown;
use rustix::stdio;
use zerosock_sys::wait_ready;

use super::blocking::{read, write};
use super::connection::Connection;
use super::progress::{Moved, Progress};

/// Interval of progress updates and checks of the time limits.
const TICK: Duration = Duration::from_millis(100);

/// When to stop.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) read_stdin: bool,
    /// Close the sending half when standard input ends.
    pub(crate) shutdown: bool,
    /// Time to continue after the end of standard input.
    pub(crate) quit: Option<Duration>,
    /// Longest time without a byte in either direction.
    pub(crate) idle: Option<Duration>,
}

/// Why not everything was delivered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PumpError {
    #[error("standard input: {0}")]
    Stdin(io::Error),
    #[error("standard output: {0}; the rest was not received")]
    Stdout(io::Error),
    #[error("sending: {0}; not everything was delivered")]
    Send(io::Error),
    #[error("receiving: {0}; the connection broke off")]
    Receive(io::Error),
    #[error("timed out: no byte moved for {0:?}")]
    Idle(Duration),
    #[error("cannot start: {0}")]
    Start(io::Error),
}

/// Transfers bytes until both directions have ended or `policy` ends them.
pub(crate) fn run(
    socket: Connection,
    policy: Policy,
    moved: &Arc<Moved>,
    progress: &mut Progress,
) -> Result<(), PumpError> {
    let socket = Arc::new(socket);
    let mut sending = if policy.read_stdin {
        let (socket, moved) = (socket.clone(), moved.clone());
        Some(Direction::start("send", move || {
            send(&socket, &moved, policy.shutdown)
        })?)
    } else {
        None
    };
    let mut receiving = {
        let (socket, moved) = (socket.clone(), moved.clone());
        Some(Direction::start("receive", move || {
            receive(&socket, &moved)
        })?)
    };
    let mut watch = Watch::new(policy);
    let mut outcome = Ok(());

    loop {
        let (sent, received) = wait(sending.as_ref(), receiving.as_ref())?;
        if sent && let Some(direction) = sending.take() {
            // Continue the other direction: a peer may stop reading and continue to write.
            outcome = outcome.and(direction.join());
            watch.sending_ended();
            if outcome.is_err() {
                // Tells the program that writes to standard input that its bytes are no longer
                // read.
                replace_stdin();
                if !socket.ends_by_itself() {
                    return outcome;
                }
            }
        }
        if received && let Some(direction) = receiving.take() {
            direction.join()?;
            if sending.is_some() {
                // Tells the program that reads standard output that no more bytes follow.
                end_stdout();
            }
        }
        progress.show(moved);
        match (&sending, &receiving) {
            (None, None) => return outcome,
            // The peer has closed both halves and there is nothing to send. If there is something,
            // the sender's next call fails, and that error is reported.
            (Some(_), None) if socket.has_peer_stopped_receiving() && !stdin_is_ready() => {
                return outcome;
            }
            _ => {}
        }
        if watch.may_quit(sending.is_none()) {
            return outcome;
        }
        watch.check_idle(moved)?;
    }
}

/// One direction: its thread, and a pipe that reaches end of file when the thread has finished.
struct Direction {
    thread: JoinHandle<Result<(), PumpError>>,
    done: PipeReader,
}

impl Direction {
    fn start(
        name: &str,
        work: impl FnOnce() -> Result<(), PumpError> + Send + 'static,
    ) -> Result<Direction, PumpError> {
        let (done, running) = io::pipe().map_err(PumpError::Start)?;
        let thread = std::thread::Builder::new()
            .name(name.to_string())
            .spawn(move || {
                let result = work();
                drop(running);
                result
            })
            .map_err(PumpError::Start)?;
        Ok(Direction { thread, done })
    }

    fn join(self) -> Result<(), PumpError> {
        self.thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Waits for one tick or until a direction has ended; returns which have.
fn wait(
    sending: Option<&Direction>,
    receiving: Option<&Direction>,
) -> Result<(bool, bool), PumpError> {
    let running = [sending, receiving];
    let mut watched: Vec<PollFd<'_>> = running
        .iter()
        .flatten()
        .map(|direction| PollFd::new(&direction.done, PollFlags::IN))
        .collect();
    match rustix::event::poll(&mut watched, Some(&tick())) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(PumpError::Start(errno.into())),
    }
    let mut ended = watched.iter().map(|fd| !fd.revents().is_empty());
    let [sent, received] =
        running.map(|direction| direction.is_some() && ended.next().unwrap_or(false));
    Ok((sent, received))
}

/// Enforces `quit` and `idle`.
struct Watch {
    policy: Policy,
    stdin_ended: Option<Instant>,
    last: (u64, u64),
    last_moved: Instant,
}

impl Watch {
    fn new(policy: Policy) -> Watch {
        Watch {
            policy,
            stdin_ended: None,
            last: (0, 0),
            last_moved: Instant::now(),
        }
    }

    fn sending_ended(&mut self) {
        self.stdin_ended = Some(Instant::now());
    }

    fn may_quit(&self, sending_is_over: bool) -> bool {
        match (self.policy.quit, self.stdin_ended) {
            (Some(quit), Some(at)) => sending_is_over && at.elapsed() >= quit,
            _ => false,
        }
    }

    fn check_idle(&mut self, moved: &Moved) -> Result<(), PumpError> {
        let now = (
            moved.sent.load(Ordering::Relaxed),
            moved.received.load(Ordering::Relaxed),
        );
        if now != self.last {
            self.last = now;
            self.last_moved = Instant::now();
        }
        match self.policy.idle {
            Some(limit) if self.last_moved.elapsed() >= limit => Err(PumpError::Idle(limit)),
            _ => Ok(()),
        }
    }
}

fn send(socket: &Connection, moved: &Moved, shutdown: bool) -> Result<(), PumpError> {
    let mut buffer = vec![0; socket.sends_at_once()];
    loop {
        let length = read(stdio::stdin(), &mut buffer).map_err(PumpError::Stdin)?;
        let Some(mut rest) = buffer.get(..length).filter(|bytes| !bytes.is_empty()) else {
            break;
        };
        while !rest.is_empty() {
            match socket.send(rest) {
                Ok(taken) => {
                    moved.sent.fetch_add(taken as u64, Ordering::Relaxed);
                    rest = rest.get(taken..).unwrap_or_default();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(PumpError::Send(error)),
            }
        }
    }
    if shutdown {
        socket.finish().map_err(PumpError::Send)?;
    }
    socket.flush().map_err(PumpError::Send)
}

fn receive(socket: &Connection, moved: &Moved) -> Result<(), PumpError> {
    let mut buffer = vec![0; socket.receives_at_once()];
    loop {
        let length = socket.receive(&mut buffer).map_err(PumpError::Receive)?;
        let Some(mut rest) = buffer.get(..length).filter(|bytes| !bytes.is_empty()) else {
            return Ok(());
        };
        while !rest.is_empty() {
            let taken = write(stdio::stdout(), rest).map_err(PumpError::Stdout)?;
            moved.received.fetch_add(taken as u64, Ordering::Relaxed);
            rest = rest.get(taken..).unwrap_or_default();
        }
    }
}

/// Whether a read from standard input would return at once: bytes, the end, or an error.
fn stdin_is_ready() -> bool {
    let events = wait_ready(stdio::stdin(), PollFlags::IN, Some(Duration::ZERO));
    events.is_ok_and(|events| !events.is_empty())
}

/// Replaces standard input by /dev/null, which keeps the descriptor number in use.
fn replace_stdin() {
    if let Ok(null) = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    {
        let _ = stdio::dup2_stdin(&null);
    }
}

/// Signals the end of file: closes a pipe, shuts down a socket for writing.
fn end_stdout() {
    // Fails unless it is a socket; the next line covers the rest.
    let _ = rustix::net::shutdown(stdio::stdout(), Shutdown::Write);
    if let Ok(null) = rustix::fs::open("/dev/null", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
    {
        let _ = stdio::dup2_stdout(&null);
    }
}

fn tick() -> Timespec {
    // One tenth of a second.
    Timespec {
        tv_sec: 0,
        tv_nsec: TICK.as_nanos() as _,
    }
}
