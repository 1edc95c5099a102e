//! `zerosock nc`: connects standard input and output to one connection.
//!
//! Steps: parse the endpoint; connect or accept once; transfer bytes in both directions at once;
//! end when both directions have ended. The exit code tells whether everything was delivered.

pub(crate) mod args;
mod attached;
mod blocking;
mod connect;
mod datagrams;
pub(crate) mod endpoint;
mod error;
mod progress;
mod pump;
mod wire;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use self::args::NcArgs;
use self::connect::Deadline;
use self::error::ConnectError;
use self::progress::{Moved, Progress};
use self::pump::Policy;
use self::wire::{Kind, Wanted};
use crate::failure::Failure;

/// Runs until the connection is over.
pub(crate) fn main(args: NcArgs) -> Result<(), Failure> {
    let endpoint = &args.endpoint;
    let say = |what: &str| {
        if args.verbose {
            eprintln!("zerosock: {endpoint}: {what}");
        }
    };
    let deadline = Deadline::after(args.timeout);
    let wanted = match (args.seqpacket, args.dgram) {
        (_, true) => Wanted::Datagrams,
        (true, false) => Wanted::Connection(Kind::Messages),
        (false, false) => Wanted::Connection(Kind::Bytes),
    };
    let listening = || say("listening");
    let socket = match connect::establish(endpoint, wanted, deadline, args.retry, listening) {
        Ok(socket) => socket,
        Err(error @ ConnectError::NoDatagrams) => {
            return Err(Failure::usage(format_args!("--dgram: {endpoint}: {error}")));
        }
        Err(error) => return Err(Failure::runtime(format_args!("{endpoint}: {error}"))),
    };
    say("connected");

    let policy = Policy {
        read_stdin: !args.no_stdin,
        shutdown: !args.no_shutdown,
        quit: args.quit,
        idle: args.timeout,
    };
    let moved = Arc::new(Moved::default());
    let mut progress = Progress::new(!args.no_progress, policy.read_stdin);
    let started = Instant::now();
    let outcome = pump::run(socket, policy, &moved, &mut progress);
    progress.clear();
    say(&format!(
        "{} bytes sent, {} received in {:.3} s",
        moved.sent.load(Ordering::Relaxed),
        moved.received.load(Ordering::Relaxed),
        started.elapsed().as_secs_f64()
    ));
    outcome.map_err(|error| Failure::runtime(format_args!("{endpoint}: {error}")))
}
