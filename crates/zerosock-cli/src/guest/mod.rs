//! `zerosock guest`: the agent in a guest, which makes endpoints on pages of the guest for its programs, served at an
//! attach socket as a host does.

pub(crate) mod args;

use std::os::fd::AsFd;
use std::thread;

use sd_notify::NotifyState;
use tracing::info;
use zerosock::guest::agent::keeper::KeeperEntry;
use zerosock::guest::agent::{Agent, Clients};
use zerosock::guest::key::GuestKey;
use zerosock_sys::hugetlbfs::HUGE_PAGE;

use self::args::GuestArgs;
use crate::failure::Failure;
use crate::service_manager::notify;
use crate::signals::{Signals, signals_failed};
use crate::{key_file, logging, sockets};

/// Runs until SIGINT or SIGTERM, or the end of the keeper.
pub(crate) fn main(args: GuestArgs, keeper: KeeperEntry) -> Result<(), Failure> {
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
    let agent = Agent::start(keeper, key).map_err(Failure::runtime)?;
    let bound = sockets::bind_packets(&args.socket, access);
    let (listener, _file) = bound.map_err(Failure::runtime)?;
    rustix::io::ioctl_fionbio(&listener, true).map_err(Failure::runtime)?;
    let clients = Clients {
        uids: match args.uids.is_empty() {
            true => vec![rustix::process::geteuid().as_raw()],
            false => args.uids,
        },
        memory: args.memory,
        endpoints: args.endpoints.into(),
    };
    let ended = thread::scope(|scope| {
        scope.spawn(|| agent.serve(&listener, &clients));
        info!(socket = %args.socket.display(), "processes may attach");
        notify(&[NotifyState::Ready]);
        let ended = signals.wait_for_end(agent.as_fd(), || {});
        notify(&[NotifyState::Stopping]);
        // The threads end their endpoints, and then themselves.
        agent.stop();
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
