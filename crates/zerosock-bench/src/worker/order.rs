//! Orders and answers of a worker: words in one line, so that a peer's program needs only the
//! standard library.
//!
//! The worker's arguments are the order. It prints, a line each: `open WORD` (the listening side,
//! when the other may connect, and the word by which it is reached), `ready` (both, when
//! connected), `result ...` or `fault TEXT`. A line on its standard input starts the work; the end
//! of its standard input ends the worker.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::touch::Fault;

/// Job of one side of a pair. The second of each two listens.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Job {
    /// Sends messages until the time is over.
    Send,
    /// Receives messages and measures.
    Receive,
    /// Sends a message, waits for the answer, and measures.
    Ping,
    /// Answers each message.
    Pong,
}

/// How a side waits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Wait {
    /// Polls without sleeping.
    Spin,
    /// Sleeps in the kernel until woken.
    Sleep,
}

/// One side's order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Order {
    /// The means of transport.
    pub(crate) peer: String,
    pub(crate) job: Job,
    pub(crate) wait: Wait,
    /// Bytes of each message.
    pub(crate) size: usize,
    /// Warm-up time, not counted.
    pub(crate) warm: Duration,
    /// Measured time after the warm-up.
    pub(crate) time: Duration,
    /// The processor to pin to.
    pub(crate) cpu: Option<usize>,
    /// The other side's processor.
    pub(crate) other_cpu: Option<usize>,
    /// A directory, or a name, unique to this run.
    pub(crate) place: String,
    /// The word of the other side's `open` line.
    pub(crate) to: Option<String>,
    /// Variant of the contestant, where it has several.
    pub(crate) how: Option<String>,
}

/// Result of the measuring side.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// Messages received, or round trips made.
    pub(crate) messages: u64,
    pub(crate) nanoseconds: u64,
    /// Of them, those received without waiting, where that was measured.
    pub(crate) busy: Option<u64>,
    /// Of `busy`, the time without that in which the receiver read bytes that it had taken.
    pub(crate) calls: Option<u64>,
    /// Messages received with those of the warm-up, where that was counted.
    pub(crate) total: Option<u64>,
    /// Of single round trips, in nanoseconds, where each was timed.
    pub(crate) p50: Option<u64>,
    pub(crate) p99: Option<u64>,
}

impl Order {
    /// Where the other side announced that it can be reached.
    pub(crate) fn destination(&self) -> Result<&str, Fault> {
        self.to
            .as_deref()
            .ok_or_else(|| "an order without its destination".to_owned())
    }
}

impl Job {
    /// Whether messages go one way only.
    pub(crate) fn is_one_way(self) -> bool {
        matches!(self, Job::Send | Job::Receive)
    }

    fn word(self) -> &'static str {
        match self {
            Job::Send => "send",
            Job::Receive => "receive",
            Job::Ping => "ping",
            Job::Pong => "pong",
        }
    }

    /// Whether this side listens.
    pub(crate) fn is_open(self) -> bool {
        matches!(self, Job::Receive | Job::Pong)
    }

    /// The job of the other side.
    pub(crate) fn other(self) -> Job {
        match self {
            Job::Send => Job::Receive,
            Job::Receive => Job::Send,
            Job::Ping => Job::Pong,
            Job::Pong => Job::Ping,
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wait = match self.wait {
            Wait::Spin => "spin",
            Wait::Sleep => "sleep",
        };
        write!(
            f,
            "peer={} job={} wait={wait} size={} warm={} time={} place={}",
            self.peer,
            self.job.word(),
            self.size,
            self.warm.as_nanos(),
            self.time.as_nanos(),
            self.place,
        )?;
        if let Some(cpu) = self.cpu {
            write!(f, " cpu={cpu}")?;
        }
        if let Some(cpu) = self.other_cpu {
            write!(f, " other_cpu={cpu}")?;
        }
        if let Some(to) = &self.to {
            write!(f, " to={to}")?;
        }
        if let Some(how) = &self.how {
            write!(f, " how={how}")?;
        }
        Ok(())
    }
}

impl FromStr for Order {
    type Err = Fault;

    fn from_str(line: &str) -> Result<Order, Fault> {
        let get = |key: &str| optional(line, key).ok_or(format!("an order without {key}: {line}"));
        let time = |key| Ok::<_, Fault>(Duration::from_nanos(number(key, &get(key)?)?));
        let cpu = |key| {
            optional(line, key)
                .map(|cpu| number(key, &cpu))
                .transpose()
                .map(|cpu| cpu.map(|cpu: u64| cpu as usize))
        };
        Ok(Order {
            peer: get("peer")?,
            job: match get("job")?.as_str() {
                "send" => Job::Send,
                "receive" => Job::Receive,
                "ping" => Job::Ping,
                "pong" => Job::Pong,
                other => return Err(format!("job {other}: send, receive, ping or pong")),
            },
            wait: match get("wait")?.as_str() {
                "spin" => Wait::Spin,
                "sleep" => Wait::Sleep,
                other => return Err(format!("wait {other}: spin or sleep")),
            },
            size: match number("size", &get("size")?)? {
                size @ 8..=0x4000_0000 => size as usize,
                size => return Err(format!("size {size}: 8 to 2^30")),
            },
            warm: time("warm")?,
            time: time("time")?,
            cpu: cpu("cpu")?,
            other_cpu: cpu("other_cpu")?,
            place: get("place")?,
            to: optional(line, "to"),
            how: optional(line, "how"),
        })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "messages={} nanoseconds={}",
            self.messages, self.nanoseconds
        )?;
        for (key, value) in [
            ("busy", self.busy),
            ("calls", self.calls),
            ("total", self.total),
            ("p50", self.p50),
            ("p99", self.p99),
        ] {
            if let Some(value) = value {
                write!(f, " {key}={value}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for Outcome {
    type Err = Fault;

    fn from_str(line: &str) -> Result<Outcome, Fault> {
        let given = |key| {
            optional(line, key)
                .map(|value| number(key, &value))
                .transpose()
        };
        let need = |key| given(key)?.ok_or(format!("a result without {key}: {line}"));
        Ok(Outcome {
            messages: need("messages")?,
            nanoseconds: need("nanoseconds")?,
            busy: given("busy")?,
            calls: given("calls")?,
            total: given("total")?,
            p50: given("p50")?,
            p99: given("p99")?,
        })
    }
}

fn optional(line: &str, key: &str) -> Option<String> {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        .map(str::to_owned)
}

fn number(key: &str, value: &str) -> Result<u64, Fault> {
    value
        .parse()
        .map_err(|_| format!("{key}={value}: no number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_reads_as_it_was_written() {
        let order = Order {
            peer: "unix".into(),
            job: Job::Ping,
            wait: Wait::Sleep,
            size: 8192,
            warm: Duration::from_millis(3),
            time: Duration::from_millis(50),
            cpu: Some(1),
            other_cpu: None,
            place: "/tmp/x".into(),
            to: Some("127.0.0.1:99".into()),
            how: Some("quick".into()),
        };
        assert_eq!(order.to_string().parse(), Ok(order.clone()));
        let other = Order {
            job: order.job.other(),
            wait: Wait::Spin,
            cpu: None,
            other_cpu: Some(0),
            to: None,
            how: None,
            ..order
        };
        assert_eq!(other.to_string().parse(), Ok(other));
        assert!("peer=unix job=dance".parse::<Order>().is_err());
        assert!("".parse::<Order>().is_err());
    }

    #[test]
    fn an_outcome_reads_as_it_was_written() {
        for outcome in [
            Outcome::default(),
            Outcome {
                messages: 5,
                nanoseconds: 7,
                busy: Some(6),
                calls: Some(4),
                total: Some(9),
                p50: Some(1),
                p99: Some(2),
            },
        ] {
            assert_eq!(outcome.to_string().parse(), Ok(outcome));
        }
        assert!("messages=5".parse::<Outcome>().is_err());
    }
}
