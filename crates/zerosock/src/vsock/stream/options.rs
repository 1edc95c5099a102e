//! Options of streams.

use std::io;
use std::sync::atomic::Ordering;

use super::Stream;

impl Stream {
    /// Changes the receive buffer (SO_VM_SOCKETS_BUFFER_SIZE), which limits the unread bytes of
    /// this stream and, as an upper bound on the credit that it uses, those at the peer. As on
    /// Linux, the size is clamped to the [bounds](Self::set_buffer_bounds), and each change is
    /// announced to the peer. A buffer may shrink at any time: bytes that the peer has credit for
    /// already still arrive, and a higher [low-water mark](Self::set_low_water) is lowered to the
    /// new size.
    ///
    /// # Errors
    /// With an [`OptionError`](crate::vsock::OptionError) inside: `InvalidInput` for 0.
    pub fn set_buffer_size(&self, bytes: u32) -> io::Result<()> {
        let bytes = self.conn.set_buffer_size(bytes)?;
        self.clamp_low_water(bytes)
    }

    /// The smallest and the largest receive buffer, in bytes (SO_VM_SOCKETS_BUFFER_MIN_SIZE and
    /// SO_VM_SOCKETS_BUFFER_MAX_SIZE). The current buffer is clamped to them at once. Default 128
    /// and 262144, or the endpoint's `window` if that is more.
    ///
    /// # Errors
    /// With an [`OptionError`](crate::vsock::OptionError) inside: `InvalidInput` when the smallest
    /// is 0 or above the largest.
    pub fn set_buffer_bounds(&self, min: u32, max: u32) -> io::Result<()> {
        match self.conn.set_buffer_bounds(min, max)? {
            Some(bytes) => self.clamp_low_water(bytes),
            None => Ok(()),
        }
    }

    /// Lowers the low-water mark to at most `bytes`.
    fn clamp_low_water(&self, bytes: u32) -> io::Result<()> {
        match self.low_water() {
            ..2 => Ok(()),
            mark => self.set_low_water(mark.min(bytes)),
        }
    }

    /// How many bytes a read waits for (SO_RCVLOWAT): it returns with fewer only at the end of the
    /// stream. 0 means 1. Pollers and maps use it, too. Credit updates are sent early enough that
    /// the peer can send so many bytes. A peer with a smaller [own buffer](Self::set_buffer_size)
    /// never sends so many at once.
    ///
    /// # Errors
    /// With an [`OptionError`](crate::vsock::OptionError) inside: `InvalidInput` for more than the
    /// receive buffer holds.
    pub fn set_low_water(&self, bytes: u32) -> io::Result<()> {
        let bytes = self.conn.set_low_water(bytes)?;
        self.low_water.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// How many bytes a read waits for; default 1.
    pub fn low_water(&self) -> u32 {
        self.low_water.load(Ordering::Relaxed)
    }

    /// Bytes that can be read without blocking (SIOCINQ).
    ///
    /// ```
    /// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
    /// use std::io::{Read, Write};
    ///
    /// (&process).write_all(b"five!")?;
    /// assert_eq!(process.unsent(), 5);
    /// host.wait_readable()?;
    /// assert_eq!(host.unread(), 5);
    /// (&host).read_exact(&mut [0; 5])?;
    /// // Another thread drives the host.
    /// while process.unsent() > 0 {}
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unread(&self) -> usize {
        self.conn.unread()
    }

    /// Whether small writes coalesce when the peer has very many packets unread. By default each
    /// write is a packet of its own, visible to the peer when the call returns. When the peer has
    /// no room for more packets, a write blocks until the peer reads.
    ///
    /// That can last forever: a reader that waits for many bytes (SO_RCVLOWAT), sent in very small
    /// pieces, never gets them. With coalescing, writes below 2 KiB are gathered in a copy while
    /// two thirds of the peer's room for packets are used (281 packets, for a buffer of 256 KiB).
    /// The copy is sent as one packet when it has 2 KiB, when the peer has read, after 2 ms and
    /// twice as long each further time, on [`flush`](std::io::Write::flush), or before a loan or a
    /// shutdown. An endpoint has no thread: its timers run in calls, and while a thread waits for
    /// it. So the program should flush after the last of several writes, unless it calls the
    /// endpoint again. Each write costs slightly more.
    ///
    /// ```
    /// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
    /// use std::io::Write;
    ///
    /// process.set_coalesce(true);
    /// for _ in 0..5000 {
    ///     (&process).write_all(b"tiny")?;
    /// }
    /// (&process).flush()?;
    /// // A stock kernel would have no room for 5000 packets.
    /// host.set_low_water(20_000)?;
    /// host.wait_readable()?;
    /// assert_eq!(host.unread(), 20_000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_coalesce(&self, coalesce: bool) {
        let mut locked = self.conn.core.lock();
        locked.backend().set_coalesces(self.conn.id, coalesce);
        locked.backend().flush();
        self.coalesces.store(coalesce, Ordering::Relaxed);
    }

    /// Whether small writes coalesce when the peer has very many packets unread.
    pub fn coalesces(&self) -> bool {
        self.coalesces.load(Ordering::Relaxed)
    }
}
