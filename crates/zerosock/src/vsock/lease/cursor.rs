//! Leased bytes as a reader: [`io::Read`], [`BufRead`] and [`bytes::Buf`].
//!
//! # Invariants
//! - Each byte is read once from memory that the peer may write: what was copied to the window comes
//!   from there until it is consumed.

use std::cell::OnceCell;
use std::fmt;
use std::io::{self, BufRead, Read};

use super::reader::LeaseReader;

/// Most bytes copied at once for a caller that asks for a slice: a few lines of the nearest cache.
const WINDOW: usize = 512;

/// Reads leased bytes from the first to the last. Implements [`Read`], [`BufRead`] and
/// [`bytes::Buf`], for any peer: slices are copies of at most 512 bytes, or the bytes themselves where
/// [`LeaseReader::as_slice`] gives them.
///
/// ```
/// use std::io::{BufRead, Read, Write};
/// use bytes::Buf;
///
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// (&process).write_all(b"\x00\x00\x00\x05name\0the rest")?;
/// let lease = host.recv()?.expect("a packet");
/// let mut cursor = lease.read().into_cursor();
/// assert_eq!(cursor.get_u32(), 5);
/// // Finds a byte.
/// let mut name = Vec::new();
/// cursor.read_until(0, &mut name)?;
/// assert_eq!(name, b"name\0");
/// let mut rest = String::new();
/// cursor.read_to_string(&mut rest)?;
/// assert_eq!(rest, "the rest");
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// It cannot outlive its lease:
///
/// ```compile_fail,E0505
/// # use bytes::Buf;
/// # use zerosock::vsock::Lease;
/// fn cursor_outlives_lease(lease: Lease<'_>) {
///     let cursor = lease.read().into_cursor();
///     drop(lease);
///     println!("{}", cursor.remaining());
/// }
/// ```
///
/// Nor can a slice outlive the next call, which may overwrite it:
///
/// ```compile_fail,E0502
/// # use bytes::Buf;
/// # use zerosock::vsock::LeaseCursor;
/// fn slice_outlives_window(mut cursor: LeaseCursor<'_>) {
///     let slice = cursor.chunk();
///     cursor.advance(1);
///     println!("{slice:?}");
/// }
/// ```
pub struct LeaseCursor<'l> {
    reader: LeaseReader<'l>,
    /// Bytes consumed.
    at: usize,
    /// Copied bytes; the byte at `at` is one of them. Empty if no slice was asked for since the last
    /// window was consumed.
    window: OnceCell<Window>,
}

struct Window {
    /// Offset of the first byte in the lease.
    start: usize,
    len: usize,
    bytes: [u8; WINDOW],
}

impl<'l> LeaseReader<'l> {
    /// Reads the bytes from the first to the last, through the traits of `std::io` and `bytes`.
    pub fn into_cursor(self) -> LeaseCursor<'l> {
        LeaseCursor {
            reader: self,
            at: 0,
            window: OnceCell::new(),
        }
    }
}

impl LeaseCursor<'_> {
    /// The next bytes: at least one, unless all were consumed.
    fn slice(&self) -> &[u8] {
        if self.window.get().is_none()
            && let Some(bytes) = self.reader.as_slice()
        {
            return bytes.get(self.at..).unwrap_or(&[]);
        }
        let window = self.window.get_or_init(|| {
            let mut bytes = [0; WINDOW];
            let len = self.reader.copy_to(self.at, &mut bytes);
            let start = self.at;
            Window { start, len, bytes }
        });
        let bytes = window.bytes.get(self.at - window.start..window.len);
        bytes.unwrap_or(&[])
    }

    fn skip(&mut self, count: usize) {
        self.at += count;
        if let Some(window) = self.window.get()
            && self.at >= window.start + window.len
        {
            self.window.take();
        }
    }
}

impl Read for LeaseCursor<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        if self.window.get().is_some() {
            let bytes = self.slice();
            done = bytes.len().min(out.len());
            out[..done].copy_from_slice(&bytes[..done]);
            self.skip(done);
        }
        let more = self.reader.copy_to(self.at, &mut out[done..]);
        self.at += more;
        Ok(done + more)
    }
}

impl BufRead for LeaseCursor<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        Ok(self.slice())
    }

    fn consume(&mut self, count: usize) {
        self.skip(count.min(self.reader.len() - self.at));
    }
}

impl bytes::Buf for LeaseCursor<'_> {
    fn remaining(&self) -> usize {
        self.reader.len() - self.at
    }

    fn chunk(&self) -> &[u8] {
        self.slice()
    }

    /// # Panics
    /// Past the end, as [`bytes::Buf`] says.
    fn advance(&mut self, count: usize) {
        let left = self.reader.len() - self.at;
        assert!(count <= left, "cannot advance by {count}: {left} are left");
        self.skip(count);
    }
}

impl fmt::Debug for LeaseCursor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseCursor")
            .field("reader", &self.reader)
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}
