//! What a stream can be told, and asked, beside its bytes.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Stream;
use crate::vsock::connection::option_calls;
use crate::vsock::options::Options;
use crate::vsock::socket::Bound;

option_calls!(Stream);

impl Stream {
    /// Changes the receive buffer: how many bytes the peer may have under way to us, and in the
    /// peer's queue at most of what we send (SO_VM_SOCKETS_BUFFER_SIZE). As in Linux, a size out of
    /// the [bounds](Self::set_buffer_bounds) becomes the nearest one within; the peer is told of
    /// each change. A buffer may shrink at any time: what the peer was promised before still
    /// arrives, and a [low-water mark](Self::set_low_water) that is above comes down to it.
    ///
    /// # Errors
    /// With an [`OptionError`](crate::vsock::OptionError) inside: `InvalidInput` for 0.
    pub fn set_buffer_size(&self, bytes: u32) -> io::Result<()> {
        let bytes = self.conn.set_buffer_size(bytes)?;
        self.mark_again(bytes)
    }

    /// The smallest and the largest receive buffer, in bytes (SO_VM_SOCKETS_BUFFER_MIN_SIZE and
    /// SO_VM_SOCKETS_BUFFER_MAX_SIZE). One that is out of them is brought within at once. At first
    /// 128 and 262144, or what the endpoint's `window` is, if that is more.
    ///
    /// # Errors
    /// With an [`OptionError`](crate::vsock::OptionError) inside: `InvalidInput` when the smallest
    /// is 0 or above the largest.
    pub fn set_buffer_bounds(&self, min: u32, max: u32) -> io::Result<()> {
        match self.conn.set_buffer_bounds(min, max)? {
            Some(bytes) => self.mark_again(bytes),
            None => Ok(()),
        }
    }

    /// The mark in a buffer of `bytes`: no higher than that.
    fn mark_again(&self, bytes: u32) -> io::Result<()> {
        match self.low_water() {
            ..2 => Ok(()),
            mark => self.set_low_water(mark.min(bytes)),
        }
    }

    /// How many bytes a read waits for (SO_RCVLOWAT): it returns with fewer only at the end of the
    /// stream. 0 is 1. Pollers and maps go by it as well, and the peer is told of room early enough
    /// that so many bytes can come. A peer of which [the own buffer](Self::set_buffer_size) is
    /// smaller never has so many under way.
    ///
    /// # Errors
    /// With an [`OptionError`](crate::vsock::OptionError) inside: `InvalidInput` for more than the
    /// receive buffer has, as so many bytes are never there at once.
    pub fn set_low_water(&self, bytes: u32) -> io::Result<()> {
        let bytes = self.conn.set_low_water(bytes)?;
        self.low_water.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// How many bytes a read waits for; at first 1.
    pub fn low_water(&self) -> u32 {
        self.low_water.load(Ordering::Relaxed)
    }

    /// Bytes that a read would give at once (SIOCINQ).
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
    /// // The host takes part: another thread lets it.
    /// while process.unsent() > 0 {}
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unread(&self) -> usize {
        self.conn.unread()
    }

    /// Whether small writes wait for each other when the peer has very many packets unread. At first
    /// they do not: each is a packet of its own, which the peer can see when the call returns, until as
    /// many are unread as the peer has room for; then a write waits for the peer to read.
    ///
    /// That may be for ever: a reader who waits for many bytes (SO_RCVLOWAT), sent in very small
    /// pieces, never gets them. If they coalesce, what is written in pieces below 2 KiB while two
    /// thirds of that many packets are unread (281, for a buffer of 256 KiB) is copied, and leaves as
    /// one packet: when it is 2 KiB, when the peer has read, after 2 ms and twice as long each time,
    /// with [`flush`](std::io::Write::flush), or in front of a loan or the end. An endpoint has no
    /// thread: time passes for it in calls, or while somebody waits for it. So the last of several
    /// writes is to be followed by a flush, unless another call of the endpoint follows. Each write
    /// costs a little more.
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
        locked.engine().set_coalesces(self.conn.id, coalesce);
        locked.engine().flush();
        self.coalesces.store(coalesce, Ordering::Relaxed);
    }

    /// Whether small writes wait for each other when the peer has very many packets unread.
    pub fn coalesces(&self) -> bool {
        self.coalesces.load(Ordering::Relaxed)
    }

    /// Takes over what its listener, or the socket that it was made of, was told.
    pub(in crate::vsock) fn adopt(&mut self, options: Options, bound: Option<Bound>) {
        self.conn.adopt(options, bound);
        if options.low_water > 1 {
            // The buffer is large enough: it was when the mark was set.
            let _ = self.set_low_water(options.low_water);
        }
    }
}
