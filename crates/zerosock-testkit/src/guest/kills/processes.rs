//! The agent, the keeper and clients as processes of the guest.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use rustix::event::PollFlags;
use rustix::process::{Pid, Signal, kill_process};
use zerosock_sys::wait_ready;

use super::terms::{LIMIT, Order, SOCKET, wait_until};

const PROGRAM: &str = "/bin/zerosock";
/// The user of clients.
const USER: u32 = 65534;
/// What the agents log.
pub(super) const LOG: &str = "/tmp/agent.log";
const NOTIFY: &str = "/tmp/notify.sock";

pub(super) struct Agent(Child);

impl Agent {
    /// Returns when processes may attach.
    pub(super) fn start(key: &str) -> io::Result<Agent> {
        let _ = fs::remove_file(NOTIFY);
        let notify = UnixDatagram::bind(NOTIFY)?;
        notify.set_read_timeout(Some(LIMIT))?;
        let log = File::options().create(true).append(true).open(LOG)?;
        let mut command = Command::new(PROGRAM);
        command.args(["guest", "--key", key, "--memory", "4M"]);
        command.args(["--attach-uid", &USER.to_string(), "--socket-mode", "0666"]);
        command.args(["--log-level", "warn"]);
        command.env("NOTIFY_SOCKET", NOTIFY);
        command.stdin(Stdio::null()).stdout(log.try_clone()?);
        let agent = command.stderr(log).spawn()?;
        let ready = notify.recv(&mut [0; 256]);
        ready.map_err(|error| io::Error::other(format!("the agent does not listen: {error}")))?;
        Ok(Agent(agent))
    }

    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    /// SIGKILL.
    pub(super) fn kill(&mut self) -> io::Result<()> {
        self.0.kill()
    }

    /// After [`kill`](Self::kill).
    pub(super) fn wait(mut self) -> io::Result<()> {
        match self.0.wait()? {
            status if status.signal() == Some(Signal::KILL.as_raw()) => Ok(()),
            status => Err(io::Error::other(format!("the agent had ended: {status}"))),
        }
    }

    /// SIGTERM.
    pub(super) fn terminate(mut self) -> io::Result<()> {
        kill_process(Pid::from_child(&self.0), Signal::TERM)?;
        match self.0.wait()? {
            status if status.success() => Ok(()),
            status => Err(io::Error::other(format!("the agent fails: {status}"))),
        }
    }
}

/// The process of the keeper, if there is one.
pub(super) fn keeper() -> io::Result<Option<u32>> {
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let id = name.to_str().and_then(|name| name.parse().ok());
        if let Some(id) = id {
            // It may have ended meanwhile.
            let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            if line.ends_with(b"\0guest-keeper\0") {
                return Ok(Some(id));
            }
        }
    }
    Ok(None)
}

/// Returns when there is none.
pub(super) fn wait_for_end_of_keeper() -> io::Result<()> {
    wait_until(|| Ok(keeper()?.map(|id| format!("the keeper runs, process {id}"))))
}

/// What a process uses.
#[derive(Copy, Clone, Debug)]
pub(super) struct Usage {
    pub(super) descriptors: usize,
    pub(super) threads: u64,
    /// Bytes of memory of its own.
    pub(super) memory: u64,
}

impl Usage {
    pub(super) fn of(id: u32) -> io::Result<Usage> {
        let descriptors = fs::read_dir(format!("/proc/{id}/fd"))?.count();
        let status = fs::read_to_string(format!("/proc/{id}/status"))?;
        let number = |name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let word = line.and_then(|line| line.split_ascii_whitespace().next());
            word.and_then(|word| word.parse::<u64>().ok()).unwrap_or(0)
        };
        Ok(Usage {
            descriptors,
            threads: number("Threads:"),
            memory: number("RssAnon:") << 10,
        })
    }

    /// Whether this is not more than before. The agent that has started the keeper has one more thread than others.
    pub(super) fn is_like(&self, before: &Usage) -> bool {
        /// The allocator keeps a little.
        const MORE: u64 = 1 << 20;
        self.descriptors == before.descriptors
            && self.threads <= before.threads
            && self.memory <= before.memory + MORE
    }
}

/// A client that streams.
pub(super) struct Client {
    child: Child,
    output: ChildStdout,
    /// Printed, and not yet looked at.
    text: String,
}

impl Client {
    /// Returns before it has attached.
    pub(super) fn start(port: u32, seed: u64, options: &[&str]) -> io::Result<Client> {
        let mut command = Command::new(PROGRAM);
        // As this process was called.
        command.args(std::env::args().skip(1).take(2));
        command.args(["client", "--socket", SOCKET]);
        command.args(["--port", &port.to_string(), "--seed", &seed.to_string()]);
        command.args(options).uid(USER).gid(USER);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let output = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let text = String::new();
        Ok(Client {
            child,
            output,
            text,
        })
    }

    /// Waits until it prints this line.
    pub(super) fn expect(&mut self, line: &str) -> io::Result<()> {
        while !self.text.contains('\n') {
            let mut bytes = [0; 256];
            let is_late = wait_ready(&self.output, PollFlags::IN, Some(LIMIT))?.is_empty();
            let len = if is_late {
                0
            } else {
                self.output.read(&mut bytes)?
            };
            if len == 0 {
                let status = if is_late {
                    None
                } else {
                    Some(self.child.wait()?)
                };
                let text = format!("a client does not say `{line}`: {status:?}");
                return Err(io::Error::other(text));
            }
            self.text += &String::from_utf8_lossy(&bytes[..len]);
        }
        let (first, rest) = self.text.split_once('\n').unwrap_or_default();
        if first != line {
            let text = format!("a client says `{first}`, not `{line}`");
            return Err(io::Error::other(text));
        }
        self.text = rest.to_owned();
        Ok(())
    }

    /// Lets it free its pages. Returns when it has.
    pub(super) fn free_pages(&mut self, order: Order) -> io::Result<()> {
        let input = self.child.stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        writeln!(input, "{order}")?;
        self.expect("freed")
    }

    /// SIGKILL.
    pub(super) fn kill(&mut self) -> io::Result<()> {
        self.child.kill()
    }

    /// After [`kill`](Self::kill). One that goes on without its pages may have got SIGBUS before.
    pub(super) fn wait_for_kill(mut self, order: Option<Order>) -> io::Result<()> {
        let status = self.child.wait()?;
        let is_killed = |signal: Signal| status.signal() == Some(signal.as_raw());
        let goes_on = order.is_some_and(|it| it.goes_on);
        if is_killed(Signal::KILL) || goes_on && is_killed(Signal::BUS) {
            return Ok(());
        }
        Err(io::Error::other(format!("a client had ended: {status}")))
    }

    /// Until it ends by itself.
    pub(super) fn wait(mut self) -> io::Result<ExitStatus> {
        // It ends when its parent has gone; `Child::wait` would close its input.
        let _input = self.child.stdin.take();
        self.child.wait()
    }
}
