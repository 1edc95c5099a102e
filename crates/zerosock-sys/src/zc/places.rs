//! Where buffers lie while the kernel reads them.
//!
//! The places are made once and never move: an address, and the list of a buffer's pieces, lie in
//! them while a request refers to them. A place counts what the kernel owes for it; its contents
//! go out only at zero.

use super::{Address, Piece, Stable};

/// A place of a carrier. Those of another carrier name some other place or none; the worst that
/// comes of mixing them up is a buffer in other hands.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct Key(pub(super) u32);

impl Key {
    /// Its number, below the capacity of its carrier: an index for what the user keeps beside it.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A buffer of several pieces, as sendmsg(2) reads it.
pub(super) struct Message {
    pub(super) header: libc::msghdr,
    /// What the header refers to.
    _pieces: Vec<libc::iovec>,
}

pub(super) struct Place<B> {
    pub(super) buffer: Option<B>,
    pub(super) address: Option<Address>,
    /// What a request refers to; replaced only while no request is under way.
    pub(super) message: Option<Box<Message>>,
    /// The number of its arena, while requests are under way that name it.
    pub(super) arena: Option<u16>,
    /// Results that are to come.
    pub(super) results: u32,
    /// Notifications that are to come.
    pub(super) notes: u32,
}

// SAFETY: what is not Send by itself are the pointers in `message`. They point to memory that the
// place's own `buffer`, which is Send, keeps in place, and to the place's own `address`; nobody
// but the kernel follows them.
unsafe impl<B: Send> Send for Place<B> {}

pub(super) struct Places<B> {
    places: Box<[Place<B>]>,
    free: Vec<u32>,
    /// Places for which the kernel owes something.
    pub(super) owed: u32,
    /// Requests that took bytes and whose notification is to come.
    pub(super) reading: u32,
}

impl<B> Places<B> {
    pub(super) fn new(capacity: u32) -> Self {
        let place = |_| Place {
            buffer: None,
            address: None,
            message: None,
            arena: None,
            results: 0,
            notes: 0,
        };
        Self {
            places: (0..capacity).map(place).collect(),
            free: (0..capacity).rev().collect(),
            owed: 0,
            reading: 0,
        }
    }

    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    pub(super) fn put(&mut self, buffer: B, address: Option<Address>) -> Result<Key, B> {
        let Some(index) = self.free.pop() else {
            return Err(buffer);
        };
        let place = &mut self.places[index as usize];
        place.buffer = Some(buffer);
        place.address = address;
        Ok(Key(index))
    }

    pub(super) fn get(&self, key: Key) -> Option<&Place<B>> {
        self.places.get(key.index())
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut Place<B>> {
        self.places.get_mut(key.index())
    }

    /// Whether the kernel owes nothing for it.
    pub(super) fn idle(&self, key: Key) -> bool {
        self.get(key)
            .is_none_or(|place| place.results == 0 && place.notes == 0)
    }

    /// The buffer, once nothing is owed.
    pub(super) fn take(&mut self, key: Key) -> Option<B> {
        if !self.idle(key) {
            return None;
        }
        let place = self.get_mut(key)?;
        let buffer = place.buffer.take()?;
        place.message = None;
        self.free.push(key.0);
        Some(buffer)
    }

    /// Drops one of the buffers, if there is one, whatever is owed for it.
    pub(super) fn drop_one(&mut self) -> bool {
        let mut buffers = self.places.iter_mut().map(|place| &mut place.buffer);
        buffers.find_map(Option::take).is_some()
    }

    /// Whether a result is to come.
    pub(super) fn has_requests(&self) -> bool {
        self.places.iter().any(|place| place.results > 0)
    }

    /// A request has been made of it, that owes a result.
    pub(super) fn begun(&mut self, key: Key) {
        if let Some(place) = self.places.get_mut(key.index()) {
            self.owed += u32::from(place.results == 0 && place.notes == 0);
            place.results += 1;
        }
    }

    /// A result has come. If a notification is to follow that has been said before (`owes`).
    pub(super) fn ended(&mut self, key: Key) {
        if let Some(place) = self
            .places
            .get_mut(key.index())
            .filter(|place| place.results > 0)
        {
            place.results -= 1;
            self.owed -= u32::from(place.results == 0 && place.notes == 0);
        }
    }

    /// A notification is to come, of a request that took bytes or not.
    pub(super) fn owes(&mut self, key: Key, took: bool) {
        if let Some(place) = self.places.get_mut(key.index()) {
            self.owed += u32::from(place.results == 0 && place.notes == 0);
            self.reading += u32::from(took);
            place.notes += 1;
        }
    }

    /// A notification has come, of a request that took bytes or not.
    pub(super) fn noted(&mut self, key: Key, took: bool) {
        if let Some(place) = self
            .places
            .get_mut(key.index())
            .filter(|place| place.notes > 0)
        {
            place.notes -= 1;
            self.reading -= u32::from(took);
            self.owed -= u32::from(place.results == 0 && place.notes == 0);
        }
    }
}

/// What of a buffer lies behind its first `from` bytes, as far as one request takes it.
pub(super) enum Rest {
    /// One piece, possibly empty.
    One(Piece),
    /// Several.
    Many(Vec<libc::iovec>),
}

impl Rest {
    pub(super) fn of(buffer: &impl Stable, from: usize, most: usize) -> Self {
        let (mut skip, mut left) = (from, most);
        let mut first = None;
        let mut many = Vec::new();
        buffer.pieces(&mut |piece| {
            let Some(mut piece) = piece.behind(&mut skip).filter(|_| left > 0) else {
                return;
            };
            piece.len = piece.len.min(left);
            left -= piece.len;
            match first {
                None => first = Some(piece),
                Some(ahead) => {
                    if many.is_empty() {
                        many.push(ahead.vector());
                    }
                    many.push(piece.vector());
                }
            }
        });
        match first {
            _ if !many.is_empty() => Self::Many(many),
            Some(piece) => Self::One(piece),
            None => Self::One(Piece::EMPTY),
        }
    }
}

impl Message {
    /// The kernel's form of `pieces`, to `address`, which must stay where it is while the header is
    /// used.
    pub(super) fn new(pieces: Vec<libc::iovec>, address: Option<&Address>) -> Self {
        Self {
            header: header(&pieces, address),
            _pieces: pieces,
        }
    }
}

/// What sendmsg(2) reads. It refers to both: they must stay where they are while it is used.
pub(super) fn header(pieces: &[libc::iovec], address: Option<&Address>) -> libc::msghdr {
    // SAFETY: all zeros is a valid `msghdr`: null pointers with zero lengths.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = pieces.as_ptr().cast_mut();
    header.msg_iovlen = pieces.len() as _;
    if let Some(address) = address {
        header.msg_name = address.as_ptr().cast_mut().cast();
        header.msg_namelen = address.len();
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zc::Buf;

    fn lengths(rest: &Rest) -> Vec<usize> {
        match rest {
            Rest::One(piece) => vec![piece.len],
            Rest::Many(pieces) => pieces.iter().map(|piece| piece.iov_len).collect(),
        }
    }

    /// Of what is longer than one request the next one takes the rest, piece by piece.
    #[test]
    fn a_request_is_no_longer_than_it_may_be() {
        let pieces = [3000, 0, 5000, 100].map(|len| Buf::from(vec![1; len]));
        let buffer = Buf::from(pieces.into_iter().collect::<Vec<_>>());
        for (from, most, expected) in [
            (0, 10_000, &[3000, 5000, 100][..]),
            (0, 3000, &[3000]),
            (0, 3001, &[3000, 1]),
            (3001, 5000, &[4999, 1]),
            (8001, 5000, &[99]),
            (8100, 5000, &[0]),
        ] {
            assert_eq!(
                lengths(&Rest::of(&buffer, from, most)),
                expected,
                "{from}, {most}"
            );
        }
        let one = Rest::of(&vec![1; 9000], 1000, 4096);
        assert_eq!(lengths(&one), [4096]);
    }
}
