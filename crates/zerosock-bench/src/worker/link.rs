//! The trait that each contestant implements: one end of a connection.

use super::touch::{Check, Fault, Message, Seen};

/// One end of a bidirectional connection.
pub(crate) trait Link {
    /// Sends one message as one packet, sample or write, or as several where the contestant limits
    /// their size: takes a buffer, writes the message into it, passes it on.
    fn send(&mut self, message: Message) -> Result<(), Fault>;

    /// Waits for one message, lets `check` read it, and releases its buffer.
    fn recv(&mut self, check: Check) -> Result<Seen, Fault>;

    /// Sends `count` messages from number `first` on, none of them the last. Overridden by
    /// contestants that send several at once.
    #[inline]
    fn send_run(&mut self, first: u64, count: u64, len: usize) -> Result<(), Fault> {
        send_each(self, first, count, len)
    }

    /// Receives at least one and at most `most` messages from number `first` on, and none after the
    /// last; returns the number received.
    #[inline]
    fn recv_run(&mut self, first: u64, most: u64, len: usize) -> Result<(u64, Seen), Fault> {
        for number in first..first + most {
            if self.recv(Check::new(number, len))? == Seen::Last {
                return Ok((number + 1 - first, Seen::Last));
            }
        }
        Ok((most, Seen::Next))
    }

    /// Flushes what was sent, where the contestant defers it.
    fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }
}

/// Sends messages one by one.
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
