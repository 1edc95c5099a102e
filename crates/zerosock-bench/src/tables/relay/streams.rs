//! Streams, datagrams and round trips of two programs through a relay.

use zerosock_relay::relay::Way;

use super::address::Kind;
use super::programs::{Load, Relay, allows};
use super::running::Running;
use crate::bench::Bench;
use crate::pair::{self, Cores, Task};
use crate::peers::unix;
use crate::processes::CpuTimes;
use crate::worker::order::{Job, Outcome, Wait};

/// What goes through a relay.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Case {
    pub(super) from: Kind,
    pub(super) to: Kind,
    /// Job of the side that measures: Receive or Ping.
    pub(super) timed: Job,
    /// Bytes of each write, datagram, or message.
    pub(super) size: usize,
    /// Whether the relay has a core to itself, and does not share that of the two programs.
    pub(super) has_own_core: bool,
}

/// Result of a measurement.
#[derive(Clone, Debug)]
pub(super) struct Figures {
    /// What the timed side measured.
    pub(super) outcome: Outcome,
    /// CPU seconds of the two programs and the relay for 10^9 bytes received; of round trips not
    /// meaningful.
    pub(super) cpu_s_per_gb: f64,
    /// The way that zerosock took.
    pub(super) way: Option<String>,
}

/// Measures once. The two programs share the sender's core, unless a placement says otherwise; the relay has
/// the receiver's core to itself, or shares theirs.
pub(super) fn measure(relay: Relay, case: Case, bench: &Bench<'_>) -> Result<Figures, String> {
    let cores = bench.cores;
    let task = Task {
        cores: Cores {
            receiver: cores.host,
            ..cores
        },
        how: Some(unix::USUAL.to_owned()),
        ..bench.task(case.timed, Wait::Sleep, case.size)
    };
    let core = if case.has_own_core {
        cores.receiver
    } else {
        cores.sender
    };
    let (from, to) = (case.from.contestant(), case.to.contestant());
    let target = pair::open(to, &task)?;
    let address = case.to.parse(&target.address)?;
    let running = match relay {
        Relay::Direct => None,
        relay => Some(Running::start(relay, case.from, &address, Load::One, core)?),
    };
    let explain = |reason| match &running {
        Some(running) => running.explain(reason),
        None => reason,
    };
    let entrance = running.as_ref().map_or(&address, |running| &running.from);
    let run = || {
        let mut sides = target.connect(from, &entrance.text())?;
        let mut processes = sides.processes().to_vec();
        processes.extend(running.as_ref().map(Running::id));
        // Before and after, all of them sleep: the times are exact.
        let before = CpuTimes::now(&processes)?;
        let [outcome, other] = sides.run()?;
        let cpu = CpuTimes::now(&processes)?.seconds_since(&before);
        let messages = outcome.total.unwrap_or(other.messages);
        let bytes = messages as f64 * case.size as f64;
        Ok((outcome, cpu * 1e9 / bytes))
    };
    let (outcome, cpu_s_per_gb) = run().map_err(explain)?;
    let way = match (relay, running) {
        (Relay::Zerosock(way), Some(running)) => Some(check_way(way, running)?),
        _ => None,
    };
    Ok(Figures {
        outcome,
        cpu_s_per_gb,
        way,
    })
}

/// The way that zerosock took, which must be the one that it was told to take: where it cannot, it
/// says so and takes another one.
fn check_way(way: Way, running: Running) -> Result<String, String> {
    let reason = running.warning();
    let taken = running.way()?;
    if allows(way, &taken) {
        return Ok(taken);
    }
    let reason = reason.unwrap_or_else(|| "it gives no reason".to_owned());
    Err(format!("it took the way {taken}: {reason}"))
}

impl Case {
    /// Whether a relay can be measured in this case.
    pub(super) fn suits(&self, relay: Relay) -> bool {
        match relay {
            Relay::Direct => self.from == self.to,
            relay => relay.takes(self.from),
        }
    }
}

impl Figures {
    /// Thousands of messages a second.
    pub(super) fn thousands(&self) -> f64 {
        self.outcome.messages as f64 * 1e6 / self.outcome.nanoseconds as f64
    }
}
