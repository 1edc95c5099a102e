//! `zerosock nc`: connects standard input and output to one connection.
//!
//! Steps: parse the endpoint; connect or accept once; transfer bytes in both directions at once;
//! end when both directions have ended. The exit code tells whether everything was delivered.
//! With `--exec` a command takes the place of standard input and output, with `--keep-open` more
//! connections follow.

pub(crate) mod args;
mod attached;
mod blocking;
pub(crate) mod connect;
mod connection;
mod datagrams;
mod deadline;
mod endpoint;
mod error;
mod exec;
mod listen;
mod progress;
mod pump;

use std::error::Error;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use self::args::NcArgs;
use self::connection::{Connection, Kind, Transport};
use self::deadline::Deadline;
use self::error::EstablishError;
use self::listen::Acceptor;
use self::progress::{Moved, Progress};
use self::pump::Policy;
use crate::failure::Failure;

/// Most commands of `--exec` at once.
const MAX_COMMANDS: usize = 64;
/// How long nothing is accepted when descriptors or memory are short, if no command ends.
const SHORTAGE_PAUSE: Duration = Duration::from_secs(1);
/// Backlog of a listener that accepts one connection, and of one that accepts more.
const BACKLOGS: [i32; 2] = [1, 128];

/// Runs until the connection is over.
pub(crate) fn main(args: NcArgs) -> Result<(), Failure> {
    let deadline = Deadline::after(args.timeout);
    let transport = match (args.seqpacket, args.dgram) {
        (_, true) => Transport::Datagrams,
        (true, false) => Transport::Connection(Kind::Messages),
        (false, false) => Transport::Connection(Kind::Bytes),
    };
    let command = Arc::new(Nc { args });
    let failed = |error| command.failed(error);
    let (endpoint, retry) = (&command.args.endpoint, command.args.retry);
    let backlog = BACKLOGS[usize::from(command.args.keep_open)];
    let acceptor = match transport {
        Transport::Connection(kind) => {
            connect::bind(endpoint, kind, backlog, deadline, retry).map_err(failed)?
        }
        Transport::Datagrams => None,
    };
    let listening = || command.log("listening");
    match acceptor {
        Some(acceptor) if command.args.keep_open => {
            listening();
            command.accept_all(&acceptor)
        }
        Some(acceptor) => {
            listening();
            let accepted = acceptor.accept(deadline).map_err(failed)?;
            acceptor.catch_signals(false);
            // Further connections are refused.
            drop(acceptor);
            command.serve(accepted)
        }
        None if command.args.keep_open => Err(Failure::usage(format_args!(
            "--keep-open: {endpoint}: it connects; give an endpoint that listens"
        ))),
        None => {
            let connected = connect::establish(endpoint, transport, deadline, retry, listening);
            command.serve(connected.map_err(failed)?)
        }
    }
}

/// The commands of `--exec` that run.
struct Commands {
    running: usize,
    /// A byte is written at the end of each command.
    ended: Arc<UnixStream>,
    /// The other end.
    ends: UnixStream,
}

impl Commands {
    fn new() -> io::Result<Commands> {
        let (ended, ends) = UnixStream::pair()?;
        ends.set_nonblocking(true)?;
        Ok(Commands {
            running: 0,
            ended: Arc::new(ended),
            ends,
        })
    }

    /// Counts the commands that have ended since the last call.
    fn note_ended(&mut self) {
        let mut bytes = [0; MAX_COMMANDS];
        if let Ok(count) = (&self.ends).read(&mut bytes) {
            self.running = self.running.saturating_sub(count);
        }
    }
}

/// One run of the command.
struct Nc {
    args: NcArgs,
}

impl Nc {
    fn log(&self, what: &str) {
        if self.args.verbose {
            eprintln!("zerosock: {}: {what}", self.args.endpoint);
        }
    }

    fn failed(&self, error: EstablishError) -> Failure {
        let endpoint = &self.args.endpoint;
        match error {
            EstablishError::NoDatagrams => {
                Failure::usage(format_args!("--dgram: {endpoint}: {error}"))
            }
            error => Failure::runtime(format_args!("{endpoint}: {error}")),
        }
    }

    /// Accepts until a signal. The failure of a connection is printed and ends nothing else.
    fn accept_all(self: &Arc<Self>, acceptor: &Acceptor) -> Result<(), Failure> {
        let report = |result: Result<(), Failure>| {
            if let Err(failure) = result {
                eprintln!("zerosock: {failure}");
            }
        };
        let mut commands = Commands::new().map_err(Failure::runtime)?;
        loop {
            commands.note_ended();
            let accepted = match commands.running {
                MAX_COMMANDS => acceptor.wait_for(&commands.ends, None).map(|()| None),
                _ => acceptor.accept(Deadline::after(None)).map(Some),
            };
            let connection = match accepted {
                Ok(Some(connection)) => connection,
                Ok(None) => continue,
                // SIGINT or SIGTERM. Commands that run keep their sockets.
                Err(EstablishError::System { source, .. })
                    if source.kind() == io::ErrorKind::Interrupted =>
                {
                    return Ok(());
                }
                // The end of a command, or another process, may change that.
                Err(error) if error.is_shortage() => {
                    report(Err(self.failed(error)));
                    match acceptor.wait_for(&commands.ends, Some(SHORTAGE_PAUSE)) {
                        Ok(()) => continue,
                        Err(_) => return Ok(()),
                    }
                }
                Err(error) => return Err(self.failed(error)),
            };
            if self.args.exec.is_some() {
                let (nc, ended) = (Arc::clone(self), Arc::clone(&commands.ended));
                let serve = move || {
                    report(nc.serve(connection));
                    // Never full: there are fewer bytes than commands.
                    let _ = (&*ended).write(&[0]);
                };
                match thread::Builder::new().name("exec".into()).spawn(serve) {
                    Ok(_) => commands.running += 1,
                    Err(error) => report(Err(Failure::runtime(error))),
                }
            } else {
                // A signal ends the connection too.
                acceptor.catch_signals(false);
                report(self.serve(connection));
                acceptor.catch_signals(true);
            }
        }
    }

    /// Serves one connection until it is over.
    fn serve(&self, connection: Connection) -> Result<(), Failure> {
        self.log("connected");
        let endpoint = &self.args.endpoint;
        let failed = |error: &dyn Error| Failure::runtime(format_args!("{endpoint}: {error}"));
        if let Some(command) = &self.args.exec {
            return exec::run(command, connection).map_err(|error| failed(&error));
        }
        let policy = Policy {
            read_stdin: !self.args.no_stdin && !self.args.keep_open,
            shutdown: !self.args.no_shutdown,
            quit: self.args.quit,
            idle: self.args.timeout,
        };
        let moved = Arc::new(Moved::default());
        let mut progress = Progress::new(!self.args.no_progress, policy.read_stdin);
        let started = Instant::now();
        let outcome = pump::run(connection, policy, &moved, &mut progress);
        progress.clear();
        self.log(&format!(
            "{} bytes sent, {} received in {:.3} s",
            moved.sent.load(Ordering::Relaxed),
            moved.received.load(Ordering::Relaxed),
            started.elapsed().as_secs_f64()
        ));
        outcome.map_err(|error| failed(&error))
    }
}
