//! Contents of messages: the receiver can check each byte at memory speed.
//!
//! A message is a sequence of 64-bit lanes that count up by an odd step from a base derived from
//! the message's number. A lost, doubled, swapped, shifted or damaged message or lane differs from
//! the expected value. Both loops below are additions and comparisons of neighbouring lanes, which
//! the compiler vectorises: memory bandwidth determines the cost.

/// Difference of neighbouring lanes.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Difference of the first lanes of neighbouring messages. Odd, and no small multiple of `STEP`: no
/// message equals its shifted neighbour.
const STRIDE: u64 = 0xd1b5_4a32_d192_ed03;
const LANE: usize = 8;
/// Bytes written or compared at once: several vectors, so that they do not depend on each other.
const BLOCK: usize = LANES * LANE;
const LANES: usize = 8;
const BLOCK_STEP: u64 = STEP.wrapping_mul(LANES as u64);

/// An error text; built only on a fault.
pub(crate) type Fault = String;

/// A message to send: its number in the stream, its length, whether it is the last.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Message {
    pub(crate) number: u64,
    pub(crate) len: usize,
    pub(crate) last: bool,
}

/// Kind of a received message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Seen {
    /// The expected one; more follow.
    Next,
    /// The expected one, and the last.
    Last,
}

impl Message {
    /// Writes the whole message.
    #[inline]
    pub(crate) fn write(self, out: &mut [u8]) {
        write(self.base(), 0, out);
    }

    /// Writes the part of the message that begins `offset` bytes into it.
    #[inline]
    pub(crate) fn write_part(self, offset: usize, out: &mut [u8]) {
        write(self.base(), offset as u64, out);
    }

    /// The lane at `index`, for senders that write lane by lane.
    #[inline]
    #[allow(
        dead_code,
        reason = "used by the programs of peers that include this folder"
    )]
    pub(crate) fn lane(self, index: u64) -> u64 {
        lane(self.base(), index)
    }

    #[inline]
    fn base(self) -> u64 {
        let base = self.number.wrapping_add(1).wrapping_mul(STRIDE);
        if self.last { !base } else { base }
    }
}

/// Check of one message, which may arrive in several parts.
#[derive(Debug)]
pub(crate) struct Check {
    number: u64,
    len: usize,
    base: u64,
    at: usize,
    /// Bits that differed anywhere.
    wrong: u64,
    last: bool,
}

impl Check {
    /// Check of message `number` of `len` bytes.
    #[inline]
    pub(crate) fn new(number: u64, len: usize) -> Check {
        let expected = Message {
            number,
            len,
            last: false,
        };
        Check {
            number,
            len,
            base: expected.base(),
            at: 0,
            wrong: 0,
            last: false,
        }
    }

    /// The message's number.
    #[inline]
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Whether a part of the message has been checked.
    #[inline]
    pub(crate) fn has_begun(&self) -> bool {
        self.at > 0
    }

    /// Bytes of the message that have not been checked.
    #[inline]
    pub(crate) fn missing(&self) -> usize {
        self.len - self.at
    }

    /// Reads every byte of the next part. The first part must hold a lane: it distinguishes the
    /// last message from others.
    #[inline]
    pub(crate) fn part(&mut self, bytes: &[u8]) {
        if self.at == 0
            && let Some(first) = bytes.first_chunk::<LANE>()
            && u64::from_le_bytes(*first) == !self.base
        {
            self.last = true;
            self.base = !self.base;
        }
        if bytes.len() > self.missing() {
            self.wrong = u64::MAX;
            return;
        }
        self.wrong |= difference(self.base, self.at as u64, bytes);
        self.at += bytes.len();
    }

    /// The result, when all parts were read.
    ///
    /// # Errors
    /// The message is not the expected one, or damaged.
    #[inline]
    pub(crate) fn finish(self) -> Result<Seen, Fault> {
        if self.wrong != 0 || self.missing() != 0 {
            return Err(self.fault());
        }
        Ok(if self.last { Seen::Last } else { Seen::Next })
    }

    #[cold]
    fn fault(&self) -> Fault {
        if self.missing() != 0 {
            format!(
                "message {} has {} bytes too few, or too many came",
                self.number,
                self.missing()
            )
        } else {
            format!(
                "message {} of {} bytes is lost, doubled or damaged",
                self.number, self.len
            )
        }
    }
}

/// A byte stream without message boundaries; each byte follows from its position.
pub(crate) mod stream {
    use super::{Fault, difference, write};

    const BASE: u64 = super::STRIDE;

    /// Writes the bytes of the stream at `position`.
    #[inline]
    pub(crate) fn fill(position: u64, out: &mut [u8]) {
        write(BASE, position, out);
    }

    /// Checks every byte that was received at `position`.
    ///
    /// # Errors
    /// A byte differs from the expected one.
    #[inline]
    pub(crate) fn check(position: u64, bytes: &[u8]) -> Result<(), Fault> {
        match difference(BASE, position, bytes) {
            0 => Ok(()),
            _ => Err(format!("wrong bytes behind byte {position} of the stream")),
        }
    }
}

#[inline]
fn lane(base: u64, index: u64) -> u64 {
    base.wrapping_add(index.wrapping_mul(STEP))
}

/// Bytes from `offset` to the next lane boundary, at most `len`.
#[inline]
fn head(offset: u64, len: usize) -> usize {
    let within = (offset % LANE as u64) as usize;
    ((LANE - within) % LANE).min(len)
}

#[inline]
fn write(base: u64, offset: u64, out: &mut [u8]) {
    let (head, body) = out.split_at_mut(head(offset, out.len()));
    write_bytes(base, offset, head);
    let offset = offset + head.len() as u64;
    let mut value = lane(base, offset / LANE as u64);
    let (blocks, rest) = body.as_chunks_mut::<BLOCK>();
    let end = offset + (blocks.len() * BLOCK) as u64;
    let mut values = block(value);
    for bytes in blocks {
        for (lane, value) in bytes.as_chunks_mut::<LANE>().0.iter_mut().zip(&mut values) {
            *lane = value.to_le_bytes();
            *value = value.wrapping_add(BLOCK_STEP);
        }
    }
    value = values[0];
    let (lanes, tail) = rest.as_chunks_mut::<LANE>();
    let end = end + (lanes.len() * LANE) as u64;
    for lane in lanes {
        *lane = value.to_le_bytes();
        value = value.wrapping_add(STEP);
    }
    write_bytes(base, end, tail);
}

/// The lanes of a block that begins with `value`.
#[inline]
fn block(value: u64) -> [u64; LANES] {
    std::array::from_fn(|index| lane(value, index as u64))
}

/// Fewer bytes than a lane, all within one lane.
#[inline]
fn write_bytes(base: u64, offset: u64, out: &mut [u8]) {
    if out.is_empty() {
        return;
    }
    let bytes = lane(base, offset / LANE as u64).to_le_bytes();
    let within = (offset % LANE as u64) as usize;
    out.copy_from_slice(&bytes[within..within + out.len()]);
}

/// OR of all bits in which `bytes`, at `offset` in a message, differ from the message.
#[inline]
fn difference(base: u64, offset: u64, bytes: &[u8]) -> u64 {
    let (head, body) = bytes.split_at(head(offset, bytes.len()));
    let mut wrong = difference_bytes(base, offset, head);
    let offset = offset + head.len() as u64;
    let mut value = lane(base, offset / LANE as u64);
    let (blocks, rest) = body.as_chunks::<BLOCK>();
    let end = offset + (blocks.len() * BLOCK) as u64;
    let mut values = block(value);
    let mut wrongs = [0; LANES];
    for bytes in blocks {
        let lanes = bytes.as_chunks::<LANE>().0.iter();
        for ((lane, value), wrong) in lanes.zip(&mut values).zip(&mut wrongs) {
            *wrong |= u64::from_le_bytes(*lane) ^ *value;
            *value = value.wrapping_add(BLOCK_STEP);
        }
    }
    value = values[0];
    wrong |= wrongs.iter().fold(0, |all, wrong| all | wrong);
    let (lanes, tail) = rest.as_chunks::<LANE>();
    let end = end + (lanes.len() * LANE) as u64;
    for lane in lanes {
        wrong |= u64::from_le_bytes(*lane) ^ value;
        value = value.wrapping_add(STEP);
    }
    wrong | difference_bytes(base, end, tail)
}

#[inline]
fn difference_bytes(base: u64, offset: u64, bytes: &[u8]) -> u64 {
    if bytes.is_empty() {
        return 0;
    }
    let expected = lane(base, offset / LANE as u64).to_le_bytes();
    let within = (offset % LANE as u64) as usize;
    let same = expected[within..within + bytes.len()] == *bytes;
    u64::from(!same)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(number: u64, len: usize, last: bool) -> Vec<u8> {
        let mut bytes = vec![0; len];
        Message { number, len, last }.write(&mut bytes);
        bytes
    }

    fn verdict(number: u64, bytes: &[u8]) -> Result<Seen, Fault> {
        let mut check = Check::new(number, bytes.len());
        check.part(bytes);
        check.finish()
    }

    #[test]
    fn sent_messages_pass_the_check_and_the_last_one_is_recognised() {
        for len in [8, 64, 100, 4096] {
            for number in [0, 1, 77, u64::MAX] {
                assert_eq!(verdict(number, &sent(number, len, false)), Ok(Seen::Next));
                assert_eq!(verdict(number, &sent(number, len, true)), Ok(Seen::Last));
            }
        }
    }

    #[test]
    fn a_lost_repeated_or_reordered_message_fails_the_check() {
        for len in [8, 64, 4096] {
            for number in 1..100 {
                assert!(
                    verdict(number, &sent(number + 1, len, false)).is_err(),
                    "lost"
                );
                assert!(
                    verdict(number, &sent(number - 1, len, false)).is_err(),
                    "doubled"
                );
                assert!(
                    verdict(number, &sent(number + 1, len, true)).is_err(),
                    "lost, then last"
                );
            }
        }
        let message = sent(5, 4096, false);
        let mut swapped = message.clone();
        swapped.rotate_left(2048);
        assert!(verdict(5, &swapped).is_err());
        let mut repeated = message.clone();
        repeated.copy_within(0..64, 64);
        assert!(verdict(5, &repeated).is_err());
    }

    #[test]
    fn every_flipped_bit_fails_the_check() {
        for last in [false, true] {
            let good = sent(3, 75, last);
            for at in 0..good.len() {
                for bit in 0..8 {
                    let mut bad = good.clone();
                    bad[at] ^= 1 << bit;
                    assert!(verdict(3, &bad).is_err(), "byte {at}, bit {bit}");
                }
            }
        }
    }

    #[test]
    fn a_message_of_the_wrong_length_fails_the_check() {
        let bytes = sent(9, 128, false);
        let mut short = Check::new(9, 128);
        short.part(&bytes[..120]);
        assert_eq!(short.missing(), 8);
        assert!(short.finish().is_err());
        let mut long = Check::new(9, 120);
        long.part(&bytes);
        assert!(long.finish().is_err());
    }

    #[test]
    fn parts_are_as_good_as_the_whole() {
        let message = Message {
            number: 8,
            len: 1000,
            last: true,
        };
        for cut in [8, 9, 64, 501, 992] {
            let mut bytes = vec![0; message.len];
            let (first, second) = bytes.split_at_mut(cut);
            message.write_part(0, first);
            message.write_part(cut, second);
            assert_eq!(bytes, sent(8, 1000, true));
            let mut check = Check::new(8, message.len);
            check.part(&bytes[..cut]);
            check.part(&bytes[cut..]);
            assert_eq!(check.finish(), Ok(Seen::Last));
        }
    }

    #[test]
    fn a_stream_may_be_split_anywhere_and_a_shifted_byte_fails_the_check() {
        let mut whole = vec![0; 300];
        stream::fill(1000, &mut whole);
        for cut in 0..=whole.len() {
            assert_eq!(stream::check(1000, &whole[..cut]), Ok(()));
            assert_eq!(stream::check(1000 + cut as u64, &whole[cut..]), Ok(()));
        }
        for shift in 1..64 {
            assert!(stream::check(1000 + shift, &whole).is_err(), "{shift}");
        }
    }
}
