//! The control queue, where the front-end hands it over. QEMU keeps it for itself; the driver of
//! user-mode Linux does not.
//!
//! Receive modes and MAC tables are accepted and change nothing: the device passes on all frames that
//! the back-end has, as the specification allows (5.1.6.5.1 and 5.1.6.5.2).

use zerosock_proto::wire::net::{COMMAND_LEN, CONTROL_ERR, CONTROL_OK, Command};
use zerosock_virtio::ring::Ring;

use crate::stats::NetStats;

/// Commands carried out in one turn.
const COMMANDS: usize = 16;

/// What commands may do now.
pub(super) struct Allowed {
    /// Most queue pairs.
    pub(super) pairs: u16,
    /// The driver was asked for an announcement.
    pub(super) announcement: bool,
}

/// What commands have done.
#[derive(Default)]
pub(super) struct Outcome {
    /// There may be more commands.
    pub(super) more: bool,
    /// The last number of queue pairs that was set.
    pub(super) pairs: Option<u16>,
    /// The driver has announced itself.
    pub(super) announced: bool,
}

/// Carries out commands.
pub(super) fn run(ring: &mut Ring, allowed: &Allowed, tally: &mut NetStats) -> Outcome {
    let mut outcome = Outcome::default();
    for _ in 0..COMMANDS {
        let Some(chain) = ring.pop_if(1, true) else {
            return outcome;
        };
        let memory = ring.queue.memory();
        let mut bytes = [0; COMMAND_LEN];
        let read = memory.read(chain.readable(), 0, &mut bytes);
        let len = chain.readable_len() as usize;
        let answer = match Command::parse(bytes.get(..read).unwrap_or_default(), len) {
            Some(Command::ReceiveMode | Command::MacTable) => CONTROL_OK,
            Some(Command::QueuePairs(wanted)) if wanted <= allowed.pairs => {
                outcome.pairs = Some(wanted);
                CONTROL_OK
            }
            Some(Command::AnnounceAck) if allowed.announcement && !outcome.announced => {
                outcome.announced = true;
                CONTROL_OK
            }
            Some(Command::QueuePairs(_) | Command::AnnounceAck) | None => {
                tally.control_refused += 1;
                CONTROL_ERR
            }
        };
        memory.write(chain.writable(), 0, &[answer]);
        ring.complete(chain, 1);
    }
    outcome.more = true;
    outcome
}
