//! What calls of a socket do when they would block, in atomics that any thread may set.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::hub::{WaitBudget, WaitMode};
use super::waiting::Wait;

/// What calls do when they would block.
#[derive(Debug)]
pub(super) struct Blocking(AtomicU8);

impl Blocking {
    pub(super) fn new() -> Blocking {
        Blocking(AtomicU8::new(0))
    }

    pub(super) fn set_nonblocking(&self, nonblocking: bool) {
        self.0.store(nonblocking.into(), Ordering::Relaxed);
    }

    /// Calls are made by registered tasks.
    #[cfg(feature = "tokio")]
    pub(super) fn set_async(&self) {
        self.0.store(2, Ordering::Relaxed);
    }

    pub(super) fn mode(&self, wait: Wait) -> WaitMode {
        match self.0.load(Ordering::Relaxed) {
            0 => WaitMode::Block(wait),
            #[cfg(feature = "tokio")]
            2 => WaitMode::Task,
            _ => WaitMode::Poll,
        }
    }
}

/// How the calls of a socket wait.
#[derive(Debug)]
pub(super) struct CallWaits {
    pub(super) blocking: Blocking,
    /// The wait mode, encoded by [`encode`].
    wait: AtomicU64,
    /// Encoded by [`encode_timeout`].
    read_timeout: AtomicU64,
    write_timeout: AtomicU64,
}

impl CallWaits {
    /// Blocking calls without time-outs.
    pub(super) fn new(wait: Wait) -> CallWaits {
        CallWaits {
            blocking: Blocking::new(),
            wait: AtomicU64::new(encode(wait)),
            read_timeout: AtomicU64::new(0),
            write_timeout: AtomicU64::new(0),
        }
    }

    pub(super) fn set_wait(&self, wait: Wait) {
        self.wait.store(encode(wait), Ordering::Relaxed);
    }

    pub(super) fn wait(&self) -> Wait {
        decode(self.wait.load(Ordering::Relaxed))
    }

    pub(super) fn set_read_timeout(&self, timeout: Option<Duration>) {
        let word = encode_timeout(timeout);
        self.read_timeout.store(word, Ordering::Relaxed);
    }

    pub(super) fn set_write_timeout(&self, timeout: Option<Duration>) {
        let word = encode_timeout(timeout);
        self.write_timeout.store(word, Ordering::Relaxed);
    }

    /// How long a receiving call that begins now may wait.
    pub(super) fn read_budget(&self) -> WaitBudget {
        self.budget(&self.read_timeout)
    }

    /// How long a sending call that begins now may wait.
    pub(super) fn write_budget(&self) -> WaitBudget {
        self.budget(&self.write_timeout)
    }

    fn budget(&self, timeout: &AtomicU64) -> WaitBudget {
        let nanos = timeout.load(Ordering::Relaxed);
        WaitBudget {
            mode: self.blocking.mode(self.wait()),
            deadline: (nanos > 0).then(|| Instant::now() + Duration::from_nanos(nanos)),
        }
    }
}

/// A time-out in nanoseconds, 0 for none; saturates.
fn encode_timeout(timeout: Option<Duration>) -> u64 {
    let nanos = timeout.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    nanos.min(u64::MAX / 4)
}

/// A wait mode as a u64: 0 sleeps, 1 spins, others are the adaptive limit in nanoseconds plus 2.
fn encode(wait: Wait) -> u64 {
    match wait {
        Wait::Sleep => 0,
        Wait::Spin => 1,
        Wait::Adaptive { limit } => u64::try_from(limit.as_nanos())
            .unwrap_or(u64::MAX)
            .saturating_add(2),
    }
}

fn decode(word: u64) -> Wait {
    match word {
        0 => Wait::Sleep,
        1 => Wait::Spin,
        nanos => Wait::Adaptive {
            limit: Duration::from_nanos(nanos - 2),
        },
    }
}

/// Makes the calls of all sockets that wait, for a type with the fields `core` and `waits`, or with
/// `$part` that has them.
macro_rules! waiting_calls {
    ($socket:ident $(, $part:tt)?) => {
        impl $socket {
            /// Calls answer [`io::ErrorKind::WouldBlock`] instead of blocking. The descriptor
            /// ([`AsFd`]) becomes readable when another try is worthwhile: when any socket of the
            /// endpoint has had an event since the last such call, or a timer is due. All sockets of
            /// an endpoint share the descriptor, and only one thread may poll it: the next call that
            /// would block clears it. Each [`Poller`](crate::vsock::Poller) is notified
            /// independently.
            ///
            /// # Errors
            /// None. The signature is that of `std::net`.
            pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
                self$(.$part)?.waits.blocking.set_nonblocking(nonblocking);
                Ok(())
            }

            /// The wait mode of this socket's calls and, unless they are set otherwise, of the sockets
            /// that it accepts. Default: as its endpoint is set.
            pub fn set_wait(&self, wait: Wait) {
                self$(.$part)?.waits.set_wait(wait);
            }
        }

        impl AsFd for $socket {
            /// The endpoint's descriptor; see [`set_nonblocking`](Self::set_nonblocking).
            fn as_fd(&self) -> BorrowedFd<'_> {
                (*self$(.$part)?.core).as_fd()
            }
        }

        impl AsRawFd for $socket {
            fn as_raw_fd(&self) -> RawFd {
                self.as_fd().as_raw_fd()
            }
        }
    };
}
pub(super) use waiting_calls;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_modes_survive_encoding() {
        let adaptive = |nanos| Wait::Adaptive {
            limit: Duration::from_nanos(nanos),
        };
        for wait in [
            Wait::Sleep,
            Wait::Spin,
            adaptive(0),
            adaptive(123),
            Wait::ADAPTIVE,
        ] {
            assert_eq!(decode(encode(wait)), wait);
        }
    }
}
