//! One side of a measured pair: a process that sends, receives, pings or answers.
//!
//! Every contestant runs these same loops; what differs is its [`Link`]. Each message is written
//! by its sender and read by its receiver byte for byte, in place where the contestant lends its
//! buffers. This folder uses nothing but the standard library and rustix, and nothing of the
//! crate around it: peers with heavy dependencies are programs of their own that include it.

pub(crate) mod jobs;
pub(crate) mod order;
pub(crate) mod touch;

use std::io::{BufRead, Write};

use order::{Order, Outcome};
use touch::{Check, Fault, Message, Seen};

/// One end of a connection, both ways.
pub(crate) trait Link {
    /// Sends one message as a packet, sample or write of its own, or as several where the
    /// contestant bounds them: takes a buffer, has the message written into it, passes it on.
    fn send(&mut self, message: Message) -> Result<(), Fault>;

    /// Waits for one message, has `check` read it, and gives its buffer back.
    fn recv(&mut self, check: Check) -> Result<Seen, Fault>;

    /// Sends `count` messages from number `first` on, none of them the last. Only for contestants
    /// that pass on many at once.
    #[inline]
    fn send_run(&mut self, first: u64, count: u64, len: usize) -> Result<(), Fault> {
        send_each(self, first, count, len)
    }

    /// Receives messages from number `first` on, at least one and at most `most`, and none behind
    /// the last; how many.
    #[inline]
    fn recv_run(&mut self, first: u64, most: u64, len: usize) -> Result<(u64, Seen), Fault> {
        for number in first..first + most {
            if self.recv(Check::new(number, len))? == Seen::Last {
                return Ok((number + 1 - first, Seen::Last));
            }
        }
        Ok((most, Seen::Next))
    }

    /// Shows the other side what has been sent, where that waits for more.
    fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }
}

/// One by one.
#[inline]
pub(crate) fn send_each<L: Link + ?Sized>(
    link: &mut L,
    first: u64,
    count: u64,
    len: usize,
) -> Result<(), Fault> {
    for number in first..first + count {
        link.send(Message {
            number,
            len,
            last: false,
        })?;
    }
    Ok(())
}

/// Stays on processor `cpu`, if one is named.
pub(crate) fn pin(cpu: Option<usize>) -> Result<(), Fault> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let Some(cpu) = cpu.filter(|cpu| *cpu < CpuSet::MAX_CPU) else {
        return Ok(());
    };
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|error| format!("pin to core {cpu}: {error}"))
}

/// Says that the other side may come, and by which word it finds us.
pub(crate) fn say_open(word: &str) -> Result<(), Fault> {
    say(&format!("open {word}"))
}

/// Waits for the word to begin, works, and stays until the other side is through as well.
pub(crate) fn work(link: &mut impl Link, order: &Order) -> Result<(), Fault> {
    work_with(|| jobs::run(link, order))
}

/// As [`work`], for a contestant that does both sides itself.
pub(crate) fn work_with(run: impl FnOnce() -> Result<Outcome, Fault>) -> Result<(), Fault> {
    say("ready")?;
    if !heard()? {
        return Ok(());
    }
    let outcome = run()?;
    say(&format!("result {outcome}"))?;
    heard().map(drop)
}

/// Works at once and says what came of it: for a side that nobody talks to while it works.
pub(crate) fn work_alone(run: impl FnOnce() -> Result<Outcome, Fault>) -> Result<(), Fault> {
    say(&format!("result {}", run()?))
}

/// Says how it ended, if not well.
pub(crate) fn end(result: Result<(), Fault>) -> bool {
    match result {
        Ok(()) => true,
        Err(fault) => {
            // Nobody may be there to hear it.
            let _ = say(&format!("fault {}", fault.replace('\n', " ")));
            false
        }
    }
}

fn say(line: &str) -> Result<(), Fault> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}")
        .and_then(|()| output.flush())
        .map_err(|error| format!("standard output: {error}"))
}

/// Whether a line came; false when the input has ended.
fn heard() -> Result<bool, Fault> {
    let mut line = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut line)
        .map(|got| got > 0)
        .map_err(|error| format!("standard input: {error}"))
}
