//! One scenario: rounds of a sender and a receiver, of which one is counted.

/// Packets of a round: a quarter of the slots of a default queue.
pub(super) const ROUND: usize = 32;
/// Rounds before counting, in which buffers grow and all slots have been used.
const WARM_UP: usize = 40;
/// Rounds that are counted.
const ROUNDS: usize = 100;

/// The side of a scenario that is counted.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Side {
    Sender,
    Receiver,
}

/// Runs the rounds of one scenario.
pub(super) fn run_scenario(side: Side, mut send: impl FnMut(), mut receive: impl FnMut()) {
    for round in 0..WARM_UP + ROUNDS {
        let count = round >= WARM_UP;
        for (mine, step) in [
            (Side::Sender, &mut send as &mut dyn FnMut()),
            (Side::Receiver, &mut receive),
        ] {
            if count && mine == side {
                measured(step);
            } else {
                step();
            }
        }
    }
}

/// The script counts what this function calls.
#[inline(never)]
fn measured(step: &mut dyn FnMut()) {
    step();
}

/// The script takes the counts of the scenario when this function returns.
#[inline(never)]
pub(super) fn end_scenario(name: &str, sends: &str, receives: &str, side: Side) {
    let step = match side {
        Side::Sender => format!("send {sends}"),
        Side::Receiver => format!("receive {receives}"),
    };
    println!("scenario {} {name} {step}", ROUND * ROUNDS);
}
