//! The buffers of frames, as lists.

use std::cell::Cell;

/// The buffers of a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chained {
    pub(super) head: u16,
    /// Not 0.
    pub(super) count: u16,
}

/// For each buffer the one behind it in its frame.
#[derive(Debug)]
pub(super) struct Parts(Box<[Cell<Part>]>);

#[derive(Clone, Copy, Debug, Default)]
struct Part {
    next: u16,
    /// Bytes of the frame in this buffer. Unused for the first one.
    len: u32,
}

impl Parts {
    pub(super) fn new(buffers: usize) -> Parts {
        Parts(vec![Cell::default(); buffers].into())
    }

    /// Makes `buffer`, with so many bytes, the one behind `last`.
    pub(super) fn append(&self, last: u16, buffer: u16, len: u32) {
        self.change(last, |part| part.next = buffer);
        self.change(buffer, |part| part.len = len);
    }

    /// The buffer behind this one, and its bytes.
    #[inline]
    pub(super) fn behind(&self, buffer: u16) -> Option<(u16, u32)> {
        let next = self.0.get(usize::from(buffer))?.get().next;
        Some((next, self.0.get(usize::from(next))?.get().len))
    }

    fn change(&self, buffer: u16, change: impl FnOnce(&mut Part)) {
        if let Some(cell) = self.0.get(usize::from(buffer)) {
            let mut part = cell.get();
            change(&mut part);
            cell.set(part);
        }
    }
}
