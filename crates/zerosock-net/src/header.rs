//! Headers in shared memory, by whole words.
//!
//! A header that is stored in memory in pieces of one width and loaded in pieces of another one waits until
//! all earlier stores have left the processor, those to buffers that the other core has included. So headers
//! go between registers and shared memory.

use zerosock_proto::wire::net::{HEADER_LEN, Header, Repr};
use zerosock_ring::GuestSlice;

/// Where the second word of eight bytes begins: it overlaps with the first one.
const SECOND: usize = HEADER_LEN - 8;

/// A private copy of the header at the start of `slice`; `None` if that is shorter. Each byte is used once.
#[inline]
pub(crate) fn read(slice: GuestSlice<'_>) -> Option<Header> {
    let [second] = slice.read_words(SECOND)?;
    let [first] = slice.read_words(0)?;
    Some(Header::from_words(first, (second >> 32) as u32))
}

/// Writes a header to the start of `slice`. False if that is shorter.
#[inline]
pub(crate) fn write(slice: GuestSlice<'_>, header: Header) -> bool {
    let (first, last) = header.to_words();
    let second = first >> 32 | u64::from(last) << 32;
    slice.write_words(SECOND, [second]) && slice.write_words(0, [first])
}

/// Writes the header of a frame in so many buffers to the start of `slice`. False if that is shorter.
#[inline]
pub(crate) fn write_repr(slice: GuestSlice<'_>, repr: &Repr, buffers: u16) -> bool {
    if *repr == Repr::PLAIN {
        let last = u64::from(buffers) << 16;
        return slice.write_words(SECOND, [last << 32]) && slice.write_words(0, [0]);
    }
    let mut header = repr.emit();
    header.set_num_buffers(buffers);
    write(slice, header)
}

#[cfg(test)]
#[path = "header_tests.rs"]
mod tests;
