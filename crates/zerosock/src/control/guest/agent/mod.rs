//! The agent in a guest, which makes endpoints on pages of the guest: for its own program, and for clients of an attach
//! socket.
//!
//! The agent owns files of huge pages and registers them with the host. Each of its endpoints has a thread, which ends the
//! endpoint with the client: a process, which gets a file and a doorbell, or an endpoint of the agent's program. No byte of
//! their traffic passes the agent. A second process, the [`keeper`], pins the pages and outlives the agent.
//!
//! # Invariants
//! - Pages that the host may still write are pinned, and their file has a name.
//! - Clients never learn physical addresses, and never see the key or a registration stream.
//! - The agent stops if the keeper ends: nothing pins the pages then.

mod attachment;
mod client;
mod event;
pub mod keeper;
mod places;

use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::thread::{CapabilitySet, capabilities};
use zerosock_sys::LogLimit;
use zerosock_sys::hugetlbfs::HugeDir;

pub use self::attachment::AgentError;
use self::attachment::Pages;
pub use self::client::Clients;
use self::event::Event;
use self::keeper::{Keeper, KeeperEntry};
use super::key::GuestKey;
use crate::control::attach::AttachRequest;
use crate::driver::guest_device::GuestDevice;

/// What the agent leaves here is for the next one.
const DIR: &str = "/run/zerosock";
const PAGES: &str = "/run/zerosock/pages";
const KEEPER: &str = "/run/zerosock/keeper.sock";

/// The agent of a virtual machine, in a privileged program inside: it makes endpoints on pages of the machine for
/// [`EndpointBuilder::attach_guest`](crate::vsock::EndpointBuilder::attach_guest).
///
/// A machine has one agent, this or `zerosock guest`, with files in `/run/zerosock`. The keeper, a process that it starts,
/// pins their pages and outlives it: the next agent frees them when the host does not use them any more.
///
/// Dropping it ends its endpoints, and waits at most 45 s for the host to confirm that.
#[derive(Debug)]
pub struct Agent {
    pages: Arc<Pages>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Agent {
    /// Starts with the key that the host has for this virtual machine. The process keeps its privileges as long as it has
    /// endpoints.
    ///
    /// # Errors
    /// [`AgentError`]: CAP_SYS_ADMIN is missing, the process is in a container, another agent runs, or the keeper cannot be
    /// started.
    pub fn start(keeper: KeeperEntry, key: GuestKey) -> Result<Agent, AgentError> {
        let held = capabilities(None).map_err(io::Error::from)?.effective;
        if !held.contains(CapabilitySet::SYS_ADMIN) {
            return Err(AgentError::Capability);
        }
        let made = DirBuilder::new().recursive(true).mode(0o755).create(DIR);
        made.map_err(|error| AgentError::Dir(DIR, error))?;
        let dir = HugeDir::open(Path::new(PAGES))?;
        let keeper = Keeper::find_or_start(Path::new(KEEPER), keeper)?;
        // No other agent makes files now.
        let names = dir.names().map_err(|error| AgentError::Dir(PAGES, error))?;
        let agent = Agent {
            pages: Arc::new(Pages {
                dir,
                keeper,
                key,
                stop: Event::new()?,
                recovered: Event::new()?,
                log: LogLimit::default(),
            }),
            threads: Mutex::default(),
        };
        agent.spawn(|pages| {
            pages.recover(names);
            pages.recovered.set();
        })?;
        agent.spawn(|pages| {
            let mut fds = [
                // Answers to other threads are no concern of this one: a hang-up is reported always.
                PollFd::new(&pages.keeper, PollFlags::empty()),
                PollFd::new(&pages.stop, PollFlags::IN),
            ];
            while poll(&mut fds, None) == Err(Errno::INTR) {}
            pages.stop.set();
        })?;
        Ok(agent)
    }

    /// Ends all endpoints.
    pub fn stop(&self) {
        self.pages.stop.set();
    }

    /// Makes an endpoint on `len` bytes for this process. It ends with the socket, by which its queues are started.
    pub(crate) fn attach(
        &self,
        request: AttachRequest,
        len: u64,
        limit: Duration,
    ) -> Result<(GuestDevice, OwnedFd), AgentError> {
        let begin = Instant::now();
        // Earlier endpoints may have the only pages that there are.
        self.pages.recovered.wait(limit);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (ours, theirs) = pair.map_err(io::Error::from)?;
        let (sender, device) = channel();
        self.spawn(move |pages| match pages.attach(request, len) {
            Ok(attachment) => {
                // A caller that does not wait any more has closed the socket.
                let _ = sender.send(attachment.device());
                pages.run(&ours, attachment, std::process::id());
            }
            Err(error) => drop(sender.send(Err(error))),
        })?;
        let left = limit.saturating_sub(begin.elapsed());
        let device = device.recv_timeout(left).unwrap_or_else(|_| {
            let text = "the host has not answered in time";
            Err(io::Error::new(io::ErrorKind::TimedOut, text).into())
        });
        Ok((device?, theirs))
    }

    /// Starts a thread, which ends soon when the agent stops.
    fn spawn(&self, run: impl FnOnce(&Pages) + Send + 'static) -> io::Result<()> {
        let pages = self.pages.clone();
        let thread = thread::Builder::new().name("zerosock-agent".to_owned());
        let thread = thread.spawn(move || run(&pages))?;
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }
}

impl AsFd for Agent {
    /// Readable when the agent has stopped: by [`stop`](Agent::stop), or because the keeper has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pages.stop.as_fd()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop();
        let threads = self.threads.get_mut();
        for thread in threads.unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = thread.join();
        }
    }
}
