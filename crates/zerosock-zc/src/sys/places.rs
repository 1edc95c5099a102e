//! The places in which buffers are stored while the kernel reads them.
//!
//! # Invariants
//! Places are allocated once and never move: a request refers to the address in its place. A place counts
//! what the kernel owes for it, and its buffer can be taken out only at zero.
#![allow(unsafe_code)]

use super::Address;

/// A place of a `ZcSocket`. Those of another `ZcSocket` name some other place or none; the worst that
/// comes of mixing them up is a buffer in other hands.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct Key(pub(super) u32);

impl Key {
    /// Its number, below the capacity of its `ZcSocket`: an index for what the user keeps beside it.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

pub(super) struct Place<B> {
    pub(super) buffer: Option<B>,
    pub(super) address: Option<Address>,
    /// Results that are to come.
    pub(super) results: u32,
    /// Notifications that are to come.
    pub(super) notes: u32,
}

pub(super) struct Places<B> {
    places: Box<[Place<B>]>,
    free: Vec<u32>,
    /// Places for which the kernel owes something.
    pub(super) busy: u32,
    /// Of places, how often a request took bytes of one whose notification is to come.
    pub(super) reading: u32,
}

impl<B> Places<B> {
    pub(super) fn new(capacity: u32) -> Self {
        let place = |_| Place {
            buffer: None,
            address: None,
            results: 0,
            notes: 0,
        };
        Self {
            places: (0..capacity).map(place).collect(),
            free: (0..capacity).rev().collect(),
            busy: 0,
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

    fn get_mut(&mut self, key: Key) -> Option<&mut Place<B>> {
        self.places.get_mut(key.index())
    }

    pub(super) fn buffer(&self, key: Key) -> Option<&B> {
        self.get(key)?.buffer.as_ref()
    }

    pub(super) fn address(&self, key: Key) -> Option<&Address> {
        self.get(key)?.address.as_ref()
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
            self.busy += u32::from(place.results == 0 && place.notes == 0);
            place.results += 1;
        }
    }

    /// A result has come. If a notification is to follow that has been said before (`expect_notification`).
    pub(super) fn ended(&mut self, key: Key) {
        if let Some(place) = self
            .places
            .get_mut(key.index())
            .filter(|place| place.results > 0)
        {
            place.results -= 1;
            self.busy -= u32::from(place.results == 0 && place.notes == 0);
        }
    }

    /// A notification is to come, of a request that took bytes or not.
    pub(super) fn expect_notification(&mut self, key: Key, took: bool) {
        if let Some(place) = self.places.get_mut(key.index()) {
            self.busy += u32::from(place.results == 0 && place.notes == 0);
            self.reading += u32::from(took);
            place.notes += 1;
        }
    }

    /// A notification has come, of a request that took bytes or not.
    pub(super) fn notified(&mut self, key: Key, took: bool) {
        if let Some(place) = self
            .places
            .get_mut(key.index())
            .filter(|place| place.notes > 0)
        {
            place.notes -= 1;
            self.reading -= u32::from(took);
            self.busy -= u32::from(place.results == 0 && place.notes == 0);
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
