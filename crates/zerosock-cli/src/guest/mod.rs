//! `zerosock guest`: the agent in a guest, which makes endpoints on pages of the guest for its programs.
//!
//! The agent owns files of huge pages, registers them with the host, and serves an attach socket as a host does. A client
//! gets a file and a doorbell, and is an endpoint from then on; no byte of its traffic passes the agent. A second process,
//! the [`keeper`], pins the pages and outlives the agent.
//!
//! # Invariants
//! - Pages that the host may still write are pinned, and their file has a name.
//! - Clients never learn physical addresses, and never see the key or a registration stream.
//! - The agent ends if the keeper does: nothing pins the pages then.

pub(crate) mod args;
mod attachment;
mod client;
pub mod keeper;
mod stop;

use std::fs::DirBuilder;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Scope};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use sd_notify::NotifyState;
use tracing::{info, warn};
use zerosock::attach::codec::Answer;
use zerosock::attach::{Status, Version};
use zerosock::guest::key::GuestKey;
use zerosock_sys::hugetlbfs::{HUGE_PAGE, HugeDir};

use self::args::GuestArgs;
use self::attachment::Pages;
use self::client::{Agent, answer};
use self::keeper::Keeper;
use self::stop::Stop;
use crate::failure::Failure;
use crate::service_manager::notify;
use crate::signals::{Signals, signals_failed};
use crate::{key_file, logging, sockets};

/// What the agent leaves here is for the next one.
const DIR: &str = "/run/zerosock";
const PAGES: &str = "/run/zerosock/pages";
const KEEPER: &str = "/run/zerosock/keeper.sock";
/// Clients that are no endpoints: their first request has not arrived.
const MAX_NEW: usize = 32;
/// How long no client is accepted when a call has failed.
const PAUSE: Duration = Duration::from_millis(100);

/// Runs until SIGINT or SIGTERM, or the end of the keeper.
pub(crate) fn main(args: GuestArgs) -> Result<(), Failure> {
    let access = args.access.access()?;
    if args.memory < HUGE_PAGE || !args.memory.is_multiple_of(HUGE_PAGE) {
        let text = format_args!("--memory {}: give a multiple of 2M", args.memory);
        return Err(Failure::usage(text));
    }
    let key = match &args.key {
        Some(path) => {
            let fix = |fix| Failure::usage(format_args!("--key {}: {fix}", path.display()));
            key_file::read(path, "--port-only").map_err(fix)?
        }
        None => GuestKey::none(),
    };
    let _logging = logging::start(&args.log);
    let signals = Signals::catch().map_err(signals_failed)?;
    let made = DirBuilder::new().recursive(true).mode(0o755).create(DIR);
    made.map_err(|error| Failure::runtime(format_args!("{DIR}: {error}")))?;
    let dir = HugeDir::open(Path::new(PAGES)).map_err(Failure::runtime)?;
    let keeper = Keeper::find_or_start(Path::new(KEEPER)).map_err(Failure::runtime)?;
    let names = dir
        .names()
        .map_err(|error| Failure::runtime(format_args!("{PAGES}: {error}")))?;
    let bound = sockets::bind_packets(&args.socket, access);
    let (listener, _file) = bound.map_err(Failure::runtime)?;
    rustix::io::ioctl_fionbio(&listener, true).map_err(Failure::runtime)?;
    let (running, stop) = Stop::new().map_err(Failure::runtime)?;
    let (kept, keeper_end) = Stop::new().map_err(Failure::runtime)?;
    let agent = Agent {
        pages: Pages {
            dir,
            keeper,
            key,
            stop,
        },
        uids: match args.uids.is_empty() {
            true => vec![rustix::process::geteuid().as_raw()],
            false => args.uids,
        },
        memory: args.memory,
        endpoints: args.endpoints.into(),
        clients: AtomicUsize::new(0),
        attached: AtomicUsize::new(0),
    };
    let ended = thread::scope(|scope| {
        scope.spawn(|| agent.pages.recover(names));
        scope.spawn(|| accept_all(&agent, &listener, scope));
        scope.spawn(|| {
            wait_for_keeper(&agent.pages);
            drop(kept);
        });
        info!(socket = %args.socket.display(), "processes may attach");
        notify(&[NotifyState::Ready]);
        let ended = signals.wait_for_end(keeper_end.as_fd(), || {});
        notify(&[NotifyState::Stopping]);
        // The threads end their endpoints, and then themselves.
        drop(running);
        ended
    });
    match ended.map_err(signals_failed)? {
        Some(name) => {
            info!("{name}: stopped");
            Ok(())
        }
        None => Err(Failure::runtime(
            "the keeper, which pins pages, has ended: endpoints are ended; start the agent again",
        )),
    }
}

/// Returns when the keeper has ended, or the agent stops.
fn wait_for_keeper(pages: &Pages) {
    let mut fds = [
        // Answers to other threads are no concern of this one: a hang-up is reported always.
        PollFd::new(&pages.keeper, PollFlags::empty()),
        PollFd::new(&pages.stop, PollFlags::IN),
    ];
    while poll(&mut fds, None) == Err(Errno::INTR) {}
}

/// Accepts clients until the agent stops.
fn accept_all<'scope>(agent: &'scope Agent, listener: &OwnedFd, scope: &'scope Scope<'scope, '_>) {
    let mut fds = [
        PollFd::new(&agent.pages.stop, PollFlags::IN),
        PollFd::new(listener, PollFlags::IN),
    ];
    loop {
        let polled = poll(&mut fds, None);
        if fds.first().is_none_or(|stop| !stop.revents().is_empty()) {
            return;
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let accepted = polled.and_then(|_| accept_with(listener, flags));
        match accepted {
            Ok(socket) => admit(agent, socket, scope),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(errno) => {
                warn!("cannot accept a process: {errno}");
                agent.pages.stop.wait(PAUSE);
            }
        }
    }
}

/// Gives a client a thread, or turns it away.
fn admit<'scope>(agent: &'scope Agent, socket: OwnedFd, scope: &'scope Scope<'scope, '_>) {
    let Ok(user) = socket_peercred(&socket) else {
        return;
    };
    let (uid, pid) = (user.uid.as_raw(), user.pid.as_raw_nonzero().get());
    let status = if !agent.uids.contains(&uid) {
        warn!(
            pid,
            uid, "process refused: its user may not attach; see --attach-uid"
        );
        Status::NotPermitted
    } else if agent.clients.fetch_add(1, Ordering::Relaxed) >= agent.endpoints + MAX_NEW {
        agent.clients.fetch_sub(1, Ordering::Relaxed);
        Status::Full
    } else {
        let serve = move || {
            agent.serve(&socket, pid);
            agent.clients.fetch_sub(1, Ordering::Relaxed);
        };
        if let Err(error) = thread::Builder::new().spawn_scoped(scope, serve) {
            warn!(pid, "cannot serve a process: {error}");
            agent.clients.fetch_sub(1, Ordering::Relaxed);
        }
        return;
    };
    let _ = answer(&socket, &Answer::refusal(status, Version::default()), &[]);
}
