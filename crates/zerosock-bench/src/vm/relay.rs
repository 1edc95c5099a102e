//! Relays in the guest, between vsock and another socket.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use zerosock::Port;
use zerosock::vsock::Stream;
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::datagrams::foreign_bytes;
use zerosock_testkit::protocol::{Command, Outcome as Done};
use zerosock_testkit::remote::{Guest, Pending};

use super::{STEP, Vm, accept, leave};
use crate::report::line;
use crate::worker::order::Wait;
use crate::worker::touch::Fault;

/// CID of the guest itself, to itself.
const LOOPBACK: u32 = 1;
/// Of the bytes that relays pass.
const SEED: u64 = 1;

/// A measurement of a relay in the guest, between vsock and another socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Relaying<'a> {
    /// As the program in the guest knows the relay.
    pub(crate) way: &'a str,
    /// `tcp`, `unix` or `udp`.
    pub(crate) kind: &'a str,
    /// CID of the other side: this process, or the guest itself.
    pub(crate) cid: u32,
    pub(crate) is_from_vsock: bool,
    pub(crate) bytes: usize,
    /// Of a write, or of a datagram.
    pub(crate) chunk: usize,
}

/// Result of a measurement of a relay.
#[derive(Clone, Debug)]
pub(crate) struct Relayed {
    /// That arrived, with the right contents.
    pub(crate) bytes: u64,
    /// From the first to the last of them.
    time: Duration,
    /// All processors of the guest.
    busy: Duration,
    /// The way that `zerosock relay` took.
    pub(crate) way: Option<String>,
}

impl Relayed {
    pub(crate) fn mb_s(&self) -> f64 {
        self.bytes as f64 / 1e6 / self.time.as_secs_f64()
    }

    pub(crate) fn cpu_s_per_gb(&self) -> f64 {
        self.busy.as_secs_f64() * 1e9 / self.bytes as f64
    }
}

impl Vm {
    /// Why the guest has no socat; `None`: it has.
    pub(crate) fn socat(&self) -> Option<&str> {
        self.socat.as_deref()
    }

    /// Description for the tables.
    pub(crate) fn describe_kernel(&self) -> String {
        let Guest { release, accel, .. } = &self.guest;
        format!("a guest with Linux {release} and two processors under {accel}")
    }

    pub(super) fn run(&self, words: &str) -> Pending {
        let argv = words.split(' ').map(str::to_owned).collect();
        self.guest.remote.start(Command::Run { argv })
    }

    /// Lets a relay in the guest pass bytes, which the receiver compares.
    pub(crate) fn relay(&self, relaying: &Relaying<'_>) -> Result<Relayed, Fault> {
        let Relaying {
            way,
            kind,
            cid,
            is_from_vsock,
            bytes,
            chunk,
        } = *relaying;
        if way == "socat"
            && let Some(reason) = &self.socat
        {
            return Err(format!("no socat in the guest: {reason}"));
        }
        let port = self.port();
        let mut words = format!(
            "/bin/zerosock {} sockmap --way {way} --kind {kind} --cid {cid} --port {port} \
             --bytes {bytes} --chunk {chunk} --seed {SEED}",
            zerosock_testkit::guest::NAME
        );
        if is_from_vsock {
            words.push_str(" --back");
        }
        let (there, here) = if cid == LOOPBACK {
            (self.run(&words), None)
        } else {
            let listener = self.host.listen(Port::new(port), 1).map_err(line)?;
            let there = self.run(&words);
            let stream = match accept(&listener, Wait::Sleep) {
                Ok(stream) => stream,
                Err(fault) => {
                    let said = relayed(there).err().unwrap_or_default();
                    return Err(format!("{fault}: {said}"));
                }
            };
            if is_from_vsock {
                let bytes = Pattern::bytes(SEED, bytes);
                for piece in bytes.chunks(chunk) {
                    (&stream).write_all(piece).map_err(line)?;
                }
                stream.shutdown(Shutdown::Write).map_err(line)?;
                leave(&stream)?;
                (there, None)
            } else {
                let received = read_to_end(&stream)?;
                (there, Some(received))
            }
        };
        let said = relayed(there)?;
        let value = |name: &str| {
            said.split_whitespace()
                .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        };
        let number = |name: &str| {
            let number = value(name).and_then(|text| text.parse::<u64>().ok());
            number.ok_or_else(|| format!("no {name}: {said}"))
        };
        let sent = Pattern::bytes(SEED, bytes);
        let (arrived, time) = match here {
            Some((received, time)) => {
                let foreign = foreign_bytes(&sent, &received, chunk);
                if foreign > 0 {
                    return Err(format!("{foreign} other bytes than were sent"));
                }
                (received.len() as u64, time)
            }
            None if is_from_vsock => {
                if value("client_sha256") != Some(sha256(&sent).as_str()) {
                    return Err(format!("other bytes than were sent: {said}"));
                }
                (bytes as u64, Duration::from_micros(number("sent_us")?))
            }
            None => {
                let arrived = number("far_bytes")?;
                if number("far_foreign")? != 0 {
                    return Err(format!("other bytes than were sent: {said}"));
                }
                (arrived, Duration::from_micros(number("far_us")?))
            }
        };
        Ok(Relayed {
            bytes: arrived,
            time,
            busy: Duration::from_micros(number("busy_us")?),
            way: value("way").map(str::to_owned),
        })
    }
}

/// Everything that arrives, and the time from the first to the last byte.
fn read_to_end(mut stream: &Stream) -> Result<(Vec<u8>, Duration), Fault> {
    let (mut all, mut buffer) = (Vec::new(), vec![0; 256 << 10]);
    let mut first = None;
    let mut last = Instant::now();
    loop {
        let count = stream.read(&mut buffer).map_err(line)?;
        if count == 0 {
            return Ok((all, last - first.unwrap_or(last)));
        }
        last = Instant::now();
        first.get_or_insert(last);
        all.extend_from_slice(&buffer[..count]);
    }
}

/// What the program in the guest that relays has printed.
fn relayed(there: Pending) -> Result<String, Fault> {
    let Done { bytes, text, .. } = there.wait(STEP).map_err(line)?;
    let said = text.unwrap_or_default();
    let result = said.lines().find_map(|line| line.strip_prefix("sockmap: "));
    match result {
        Some(result) if bytes == 0 => Ok(result.to_owned()),
        _ => Err(format!("in the guest: {}", line(&said))),
    }
}
