//! Access to vsock packet headers in shared memory.
//!
//! A header is read and written in words of eight bytes, each by one access. A copy through private
//! memory, stored in narrow pieces and loaded in wide ones, would defeat store-to-load forwarding
//! and wait for all earlier stores, including those to the peer's cache lines.
//!
//! # Invariants
//! Each byte is read once into a private copy, and only the copy is used.

use zerosock_proto::wire::vsock::{HEADER_LEN, ParseError, Repr};
use zerosock_ring::{GuestSlice, Memory, Piece};

/// Offset of the last word. The header's length is an odd number of half-words, so this word
/// overlaps the one before.
const TAIL: usize = HEADER_LEN - 8;

/// Why a header could not be read.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum HeaderFault {
    /// The pieces are shorter than a header.
    Short,
    /// A field has an invalid value.
    Bad(ParseError),
}

/// Reads the header at the beginning of `pieces`.
#[inline(always)] // keeps the header in registers
pub(crate) fn read(memory: &Memory, pieces: &[Piece]) -> Result<Repr, HeaderFault> {
    match memory.contiguous(pieces, 0, HEADER_LEN) {
        Some(slice) => load(slice),
        None => parse(read_divided(memory, pieces)),
    }
}

/// Reads the header at the beginning of `slice`.
#[inline(always)] // as `read`
pub(crate) fn load(slice: GuestSlice<'_>) -> Result<Repr, HeaderFault> {
    parse(slice.read_words(0).zip(slice.read_words(TAIL)))
}

#[inline(always)] // as `read`
fn parse(words: Option<([u64; 5], [u64; 1])>) -> Result<Repr, HeaderFault> {
    let (words, [tail]) = words.ok_or(HeaderFault::Short)?;
    Repr::from_words(words, (tail >> 32) as u32).map_err(HeaderFault::Bad)
}

/// Reads the words of a header that lies in several pieces.
#[cold]
#[inline(never)]
fn read_divided(memory: &Memory, pieces: &[Piece]) -> Option<([u64; 5], [u64; 1])> {
    let words = memory.read_words(pieces, 0)?;
    Some((words, memory.read_words(pieces, TAIL)?))
}

/// Writes a header to the beginning of `pieces`. Returns false if they are too short.
#[inline(always)] // as `read`
pub(crate) fn write(memory: &Memory, pieces: &[Piece], header: &Repr) -> bool {
    match memory.contiguous(pieces, 0, HEADER_LEN) {
        Some(slice) => store(slice, header),
        None => write_divided(memory, pieces, header),
    }
}

/// Writes a header to the beginning of `slice`. Returns false if it is too short.
#[inline(always)] // as `read`
pub(crate) fn store(slice: GuestSlice<'_>, header: &Repr) -> bool {
    let (words, tail) = words_of(header);
    slice.write_words(0, words) && slice.write_words(TAIL, [tail])
}

/// The words of a header: five from its beginning, and the last.
#[inline(always)] // as `read`
fn words_of(header: &Repr) -> ([u64; 5], u64) {
    let (words, last) = header.to_words();
    (words, words[4] >> 32 | u64::from(last) << 32)
}

/// Writes the words of a header into several pieces.
#[cold]
#[inline(never)]
fn write_divided(memory: &Memory, pieces: &[Piece], header: &Repr) -> bool {
    let (words, tail) = words_of(header);
    memory.write_words(pieces, 0, words) && memory.write_words(pieces, TAIL, [tail])
}

#[cfg(test)]
#[path = "header_tests.rs"]
mod tests;
