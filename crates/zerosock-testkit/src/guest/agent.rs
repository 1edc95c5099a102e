//! The agent: reads commands from a serial line, runs each on a thread of its own, and writes the
//! outcome. See `crate::protocol`.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use zerosock_sys::vsock;

use super::calls::{self, Made};
use super::owned;
use super::patterns::{self, Patterns};
use super::stream::{self, elapsed, errno_name};
use crate::calls::Call;
use crate::protocol::{
    Command, FromGuest, Outcome, READ_REPORT, Request, ShutdownDirection, Socket, SocketOption,
};

/// Longer than the kernel's own 2 s, so that the error comes from the kernel.
const CONNECT: Duration = Duration::from_secs(10);

struct Agent {
    line: Mutex<File>,
    sockets: Mutex<Table>,
    kept: Mutex<Arc<Vec<u8>>>,
    patterns: Mutex<Option<Patterns>>,
}

#[derive(Default)]
struct Table {
    last: Socket,
    open: HashMap<Socket, Arc<OwnedFd>>,
}

/// Result of a command: an outcome, or why it is invalid.
type Answer = Result<Outcome, String>;

/// Serves the line until it ends.
pub(super) fn run(tty: &Path) -> io::Result<()> {
    // Thousands of sockets. Fails only for a user without the right.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(1 << 16),
            maximum: Some(1 << 16),
        },
    );
    let line = OpenOptions::new().read(true).write(true).open(tty)?;
    let mut settings = tcgetattr(&line)?;
    settings.make_raw();
    tcsetattr(&line, OptionalActions::Now, &settings)?;
    let reader = BufReader::new(line.try_clone()?);
    let agent = Arc::new(Agent {
        line: Mutex::new(line),
        sockets: Mutex::default(),
        kept: Mutex::default(),
        patterns: Mutex::default(),
    });
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?
        .trim()
        .to_owned();
    // The newline ends any partial line of firmware and kernel.
    locked(&agent.line).write_all(b"\n")?;
    agent.say(&FromGuest::Hello { release });
    let mut read = 0;
    for text in reader.lines() {
        let text = text?;
        read += text.len() + "\n".len();
        if read >= READ_REPORT {
            agent.say(&FromGuest::Read { bytes: read });
            read = 0;
        }
        let Ok(Request { id, command }) = serde_json::from_str(&text) else {
            continue;
        };
        let agent = agent.clone();
        thread::spawn(move || {
            let outcome = agent.run(command);
            agent.say(&FromGuest::Reply { id, outcome });
        });
    }
    Ok(())
}

impl Agent {
    fn say(&self, message: &FromGuest) {
        let mut line = serde_json::to_vec(message).unwrap_or_default();
        line.push(b'\n');
        // The host has closed the line: there is no reader for an error.
        let _ = locked(&self.line).write_all(&line);
    }

    fn run(&self, command: Command) -> Answer {
        let start = Instant::now();
        let answer = match command {
            Command::Connect { cid, port } => {
                Ok(self.made(start, vsock::connect_blocking(cid, port, CONNECT)))
            }
            Command::Listen { port } => {
                Ok(self.made(start, vsock::listen(vsock::CID_ANY, port, 256)))
            }
            Command::Accept { socket } => {
                let listener = self.socket(socket)?;
                Ok(match vsock::accept_blocking(&*listener) {
                    Ok((fd, cid, port)) => Outcome {
                        peer: Some((cid, port)),
                        ..self.made(start, Ok(fd))
                    },
                    Err(error) => self.made(start, Err(error)),
                })
            }
            Command::Echo { socket } => {
                let listener = self.socket(socket)?;
                thread::spawn(move || {
                    while let Ok((fd, _, _)) = vsock::accept_blocking(&*listener) {
                        thread::spawn(move || stream::echo(&fd));
                    }
                });
                Ok(Outcome::default())
            }
            Command::Send {
                socket,
                source,
                chunks,
            } => {
                let kept = locked(&self.kept).clone();
                Ok(stream::send(&*self.socket(socket)?, source, &chunks, &kept))
            }
            Command::SendOwned {
                socket,
                seed,
                len,
                chunk,
                backend,
            } => owned::send(&*self.socket(socket)?, seed, len, chunk, &backend),
            Command::SendOwnedTcp {
                seed,
                len,
                chunk,
                backend,
                keys,
            } => owned::send_tcp(seed, len, chunk, &backend, keys),
            Command::Receive {
                socket,
                limit,
                keep,
                acknowledge,
            } => {
                let (outcome, bytes) =
                    stream::receive(&*self.socket(socket)?, limit, keep, acknowledge);
                if keep {
                    *locked(&self.kept) = Arc::new(bytes);
                }
                Ok(outcome)
            }
            Command::Poll { socket, timeout_ms } => {
                let fd = self.socket(socket)?;
                let limit = Timespec {
                    tv_sec: i64::from(timeout_ms / 1000),
                    tv_nsec: i64::from(timeout_ms % 1000) * 1_000_000,
                };
                let ready = poll(&mut [PollFd::new(&*fd, PollFlags::IN)], Some(&limit));
                Ok(match ready {
                    Ok(count) => Outcome {
                        end: count > 0,
                        ..Outcome::default()
                    },
                    Err(error) => failed(&error.into()),
                })
            }
            Command::Shutdown { socket, how } => {
                let how = match how {
                    ShutdownDirection::Receive => Shutdown::Read,
                    ShutdownDirection::Send => Shutdown::Write,
                    ShutdownDirection::Both => Shutdown::Both,
                };
                Ok(done(
                    rustix::net::shutdown(&*self.socket(socket)?, how).map_err(Into::into),
                ))
            }
            Command::Set { socket, option } => {
                let fd = self.socket(socket)?;
                Ok(done(match option {
                    SocketOption::ReceiveLowWater(bytes) => {
                        vsock::set_receive_low_water(&*fd, bytes)
                    }
                    SocketOption::BufferSize(bytes) => vsock::set_buffer_size(&*fd, bytes),
                }))
            }
            Command::Close { socket } => {
                locked(&self.sockets).open.remove(&socket);
                Ok(Outcome::default())
            }
            Command::Call(call) => self.call(&call),
            Command::Run { argv } => program(&argv),
            Command::Start { argv } => start_program(&argv),
            Command::Patterns(step) => {
                let text = patterns::run(&step, &mut locked(&self.patterns));
                Ok(Outcome {
                    text: Some(text.map_err(|error| format!("{step:?}: {error}"))?),
                    ..Outcome::default()
                })
            }
            Command::Reboot => program(&["/bin/busybox".into(), "reboot".into(), "-f".into()]),
            Command::PowerOff => program(&["/bin/busybox".into(), "poweroff".into(), "-f".into()]),
        };
        answer.map(|outcome| Outcome {
            elapsed_us: if outcome.elapsed_us == 0 {
                elapsed(start)
            } else {
                outcome.elapsed_us
            },
            ..outcome
        })
    }

    fn call(&self, call: &Call) -> Answer {
        let start = Instant::now();
        let socket = match call.socket() {
            Some(socket) => Some(self.socket(socket)?),
            None => None,
        };
        let made = calls::make(call, socket.as_deref());
        Ok(match made {
            Ok(Made::Socket(fd, peer)) => Outcome {
                peer,
                ..self.made(start, Ok(fd))
            },
            other => Outcome {
                elapsed_us: elapsed(start),
                ..calls::outcome(other)
            },
        })
    }

    fn made(&self, start: Instant, result: io::Result<OwnedFd>) -> Outcome {
        let elapsed_us = elapsed(start);
        match result {
            Ok(fd) => {
                let mut table = locked(&self.sockets);
                table.last += 1;
                let socket = table.last;
                table.open.insert(socket, Arc::new(fd));
                Outcome {
                    socket: Some(socket),
                    elapsed_us,
                    ..Outcome::default()
                }
            }
            Err(error) => Outcome {
                elapsed_us,
                ..failed(&error)
            },
        }
    }

    fn socket(&self, socket: Socket) -> Result<Arc<OwnedFd>, String> {
        locked(&self.sockets)
            .open
            .get(&socket)
            .cloned()
            .ok_or(format!("no socket {socket}"))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(error: &io::Error) -> Outcome {
    Outcome {
        errno: Some(errno_name(error)),
        ..Outcome::default()
    }
}

fn done(result: io::Result<()>) -> Outcome {
    result.map_or_else(|error| failed(&error), |()| Outcome::default())
}

fn command(argv: &[String]) -> Result<std::process::Command, String> {
    let (program, arguments) = argv.split_first().ok_or("no program")?;
    let mut command = std::process::Command::new(program);
    command.args(arguments);
    Ok(command)
}

fn program(argv: &[String]) -> Answer {
    let output = command(argv)?
        .output()
        .map_err(|error| format!("{argv:?}: {error}"))?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    let status = output
        .status
        .code()
        .and_then(|code| u64::try_from(code).ok());
    Ok(Outcome {
        bytes: status.unwrap_or(255),
        text: Some(text),
        ..Outcome::default()
    })
}

fn start_program(argv: &[String]) -> Answer {
    let mut child = command(argv)?
        .stdin(Stdio::null())
        .spawn()
        .map_err(|error| format!("{argv:?}: {error}"))?;
    thread::spawn(move || child.wait());
    Ok(Outcome::default())
}
