//! `zerosock nc`: connects standard input and output to one connection.
//!
//! Steps: parse the endpoint; connect or accept once; transfer bytes in both directions at once;
//! end when both directions have ended. The exit code tells whether everything was delivered.
//! With `--exec` a command takes the place of standard input and output, with `--keep-open` more
//! connections follow.

pub(crate) mod args;
mod attached;
mod blocking;
mod connect;
mod connection;
mod datagrams;
mod deadline;
pub(crate) mod endpoint;
mod error;
mod exec;
mod listen;
mod progress;
mod pump;

use std::error::Error;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

use self::args::NcArgs;
use self::connection::{Connection, Kind, Transport};
use self::deadline::Deadline;
use self::error::ConnectError;
use self::listen::Acceptor;
use self::progress::{Moved, Progress};
use self::pump::Policy;
use crate::failure::Failure;

/// Most commands of `--exec` at once.
const MAX_COMMANDS: usize = 64;
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

    fn failed(&self, error: ConnectError) -> Failure {
        let endpoint = &self.args.endpoint;
        match error {
            ConnectError::NoDatagrams => {
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
        let (ended, ends) = mpsc::channel();
        let mut running = 0;
        loop {
            // All that ended meanwhile, and one more if there are too many.
            running -= ends.try_iter().count();
            if running == MAX_COMMANDS && ends.recv().is_ok() {
                running -= 1;
            }
            let connection = match acceptor.accept(Deadline::after(None)) {
                Ok(connection) => connection,
                // SIGINT or SIGTERM. Commands that run keep their sockets.
                Err(ConnectError::System { source, .. })
                    if source.kind() == io::ErrorKind::Interrupted =>
                {
                    return Ok(());
                }
                Err(error) => return Err(self.failed(error)),
            };
            if self.args.exec.is_some() {
                let (nc, ended) = (Arc::clone(self), ended.clone());
                let serve = move || {
                    report(nc.serve(connection));
                    let _ = ended.send(());
                };
                match thread::Builder::new().name("exec".into()).spawn(serve) {
                    Ok(_) => running += 1,
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
