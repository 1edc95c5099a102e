//! The places in which buffers are stored while the kernel reads them.
//!
//! # Invariants
//! Places are allocated once and never move: a request refers to the address in its place. A place
//! counts its pending results and notifications, and its buffer can be taken out only when there
//! are none; `take_busy` takes it out to leak it.
#![allow(unsafe_code)]

use super::SocketAddress;

/// Identifies a place of a `ZcSocket`. In another `ZcSocket` it identifies an unrelated place or
/// none, so that a call may return the wrong buffer; this is safe.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct Key(pub(super) u32);

impl Key {
    /// The index of the place, below the capacity of its `ZcSocket`, for arrays beside it.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Storage for one buffer and its destination.
pub(super) struct Place<B> {
    pub(super) buffer: Option<B>,
    pub(super) address: Option<SocketAddress>,
    /// Number of pending results.
    pub(super) results: u32,
    /// Number of pending notifications.
    pub(super) notifications: u32,
}

/// All places of a `ZcSocket`.
pub(super) struct Places<B> {
    places: Box<[Place<B>]>,
    free: Vec<u32>,
    /// Number of places with a pending result or notification.
    pub(super) busy: u32,
    /// Number of pending notifications of requests that took bytes, counted for each place of a
    /// request.
    pub(super) reading: u32,
}

impl<B> Places<B> {
    pub(super) fn new(capacity: u32) -> Self {
        let place = |_| Place {
            buffer: None,
            address: None,
            results: 0,
            notifications: 0,
        };
        Self {
            places: (0..capacity).map(place).collect(),
            free: (0..capacity).rev().collect(),
            busy: 0,
            reading: 0,
        }
    }

    /// Number of free places.
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Stores a buffer in a free place; returns it if there is none.
    pub(super) fn put(&mut self, buffer: B, address: Option<SocketAddress>) -> Result<Key, B> {
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

    pub(super) fn address(&self, key: Key) -> Option<&SocketAddress> {
        self.get(key)?.address.as_ref()
    }

    /// Whether the place has no pending result or notification.
    pub(super) fn idle(&self, key: Key) -> bool {
        self.get(key)
            .is_none_or(|place| place.results == 0 && place.notifications == 0)
    }

    /// Takes the buffer out of an idle place.
    pub(super) fn take(&mut self, key: Key) -> Option<B> {
        if !self.idle(key) {
            return None;
        }
        let place = self.get_mut(key)?;
        let buffer = place.buffer.take()?;
        self.free.push(key.0);
        Some(buffer)
    }

    /// Drops one of the buffers, if there is one, also of a busy place.
    pub(super) fn drop_one(&mut self) -> bool {
        let mut buffers = self.places.iter_mut().map(|place| &mut place.buffer);
        buffers.find_map(Option::take).is_some()
    }

    /// Takes the buffers out of the busy places, which the kernel may read: they must not be freed.
    pub(super) fn take_busy(&mut self) -> impl Iterator<Item = B> {
        let is_busy = |place: &&mut Place<B>| place.results > 0 || place.notifications > 0;
        let busy = self.places.iter_mut().filter(is_busy);
        busy.filter_map(|place| place.buffer.take())
    }

    /// Whether a result is pending.
    pub(super) fn has_requests(&self) -> bool {
        self.places.iter().any(|place| place.results > 0)
    }

    /// Adds a pending result: a request was made of this place.
    pub(super) fn begun(&mut self, key: Key) {
        if let Some(place) = self.places.get_mut(key.index()) {
            self.busy += u32::from(place.results == 0 && place.notifications == 0);
            place.results += 1;
        }
    }

    /// Removes a pending result. A notification that follows was added before
    /// (`expect_notification`).
    pub(super) fn ended(&mut self, key: Key) {
        if let Some(place) = self
            .places
            .get_mut(key.index())
            .filter(|place| place.results > 0)
        {
            place.results -= 1;
            self.busy -= u32::from(place.results == 0 && place.notifications == 0);
        }
    }

    /// Adds a pending notification of a request, which `took` bytes of this place or none.
    pub(super) fn expect_notification(&mut self, key: Key, took: bool) {
        if let Some(place) = self.places.get_mut(key.index()) {
            self.busy += u32::from(place.results == 0 && place.notifications == 0);
            self.reading += u32::from(took);
            place.notifications += 1;
        }
    }

    /// Removes a pending notification; `took` as when it was added.
    pub(super) fn notified(&mut self, key: Key, took: bool) {
        if let Some(place) = self
            .places
            .get_mut(key.index())
            .filter(|place| place.notifications > 0)
        {
            place.notifications -= 1;
            self.reading -= u32::from(took);
            self.busy -= u32::from(place.results == 0 && place.notifications == 0);
        }
    }
}

/// The header that sendmsg(2) reads. It points to `pieces` and `address`: they must not move while
/// it is in use.
pub(super) fn header(pieces: &[libc::iovec], address: Option<&SocketAddress>) -> libc::msghdr {
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
