//! One lent buffer: in place, or private after the endpoint has moved it.
//!
//! # Invariants
//! - Nothing is written in place after the endpoint has moved the loan.
//! - Each write in place enters the loan before and leaves it after.

use std::sync::Arc;

use zerosock_ring::{Claim, Piece, Trust};

use super::slice::{LoanSlice, SlicePlace};
use crate::table::leases::Entered;
use crate::table::sockets::BufferPlace;
use crate::table::{backend::Backend, transfers::LoanParts};
use crate::vsock::errors::StreamError;
use crate::vsock::hub::Core;

/// Fills gaps that the application leaves in a loan: the buffer may hold bytes of other peers'
/// packets.
pub(in crate::vsock) static ZEROS: [u8; 4096] = [0; 4096];

/// One lent buffer; see the module.
#[derive(Debug)]
pub(in crate::vsock) struct Buffer {
    /// Its index among the endpoint's leases; unused for some buffers that were always private.
    pub(super) index: u32,
    pub(super) len: usize,
    pub(super) place: Option<BufferPlace>,
    /// The bytes of a buffer that is not, or no longer, in place.
    pub(super) private: Vec<u8>,
}

/// Write access to an entered loan; leaves it on drop.
pub(super) struct WriteAccess<'a> {
    pub(super) core: &'a Core,
    pub(super) index: u32,
}

impl Drop for WriteAccess<'_> {
    fn drop(&mut self) {
        self.core.end_access(self.index);
    }
}

impl Buffer {
    pub(in crate::vsock) fn new(parts: LoanParts) -> Buffer {
        let LoanParts { index, len, place } = parts;
        let private = match place {
            Some(_) => Vec::new(),
            None => vec![0; len],
        };
        Buffer {
            index,
            len,
            place,
            private,
        }
    }

    pub(in crate::vsock) fn index(&self) -> u32 {
        self.index
    }

    /// Its length in bytes.
    pub(in crate::vsock) fn len(&self) -> usize {
        self.len
    }

    pub(in crate::vsock) fn is_in_place(&self) -> bool {
        self.place.is_some()
    }

    /// The first `len` bytes, if it is not in place.
    pub(in crate::vsock) fn private(&self, len: usize) -> Option<&[u8]> {
        let bytes = self.private.get(..len).unwrap_or(&self.private);
        self.place.is_none().then_some(bytes)
    }

    /// Writes `bytes` at `offset`; returns how many fit. `filled`: whether it has earlier writes.
    pub(in crate::vsock) fn write(
        &mut self,
        core: &Core,
        offset: usize,
        bytes: &[u8],
        filled: bool,
    ) -> Result<usize, StreamError> {
        let offset = offset.min(self.len);
        let fits = bytes.len().min(self.len - offset);
        let bytes = bytes.get(..fits).unwrap_or(bytes);
        let index = self.index;
        match self.enter(core, filled)? {
            Some(BufferPlace::InPlace { memory, pieces }) => {
                let written = memory.write(pieces, offset, bytes);
                core.end_access(index);
                Ok(written)
            }
            _ => {
                if let Some(to) = self.private.get_mut(offset..offset + fits) {
                    to.copy_from_slice(bytes);
                }
                Ok(fits)
            }
        }
    }

    /// Fills the bytes from `filled` to `end`, which the application has left out, with zeros; returns
    /// how many bytes are filled now.
    pub(in crate::vsock) fn fill_gap(
        &mut self,
        core: &Core,
        mut filled: usize,
        end: usize,
    ) -> Result<usize, StreamError> {
        while filled < end {
            let part = ZEROS.len().min(end - filled);
            match self.write(core, filled, &ZEROS[..part], filled > 0)? {
                0 => break,
                done => filled += done,
            }
        }
        Ok(filled)
    }

    /// Slices of its bytes from `offset` on: one for each piece of memory.
    pub(in crate::vsock) fn add_slices_to<'l>(
        &'l mut self,
        core: &'l Core,
        trust: Option<Trust>,
        offset: usize,
        filled: bool,
        out: &mut Vec<LoanSlice<'l>>,
    ) -> Result<(), StreamError> {
        let (index, len) = (self.index, self.len);
        if self.enter(core, filled)?.is_none() {
            let bytes = self.private.get_mut(offset..).unwrap_or(&mut []);
            let place = SlicePlace::Private(bytes);
            out.push(LoanSlice { core, index, place });
            return Ok(());
        }
        // Each slice enters once more; this access ends when all have entered.
        let _access = WriteAccess { core, index };
        let Some(BufferPlace::InPlace { memory, pieces }) = &self.place else {
            return Err(StreamError::Revoked);
        };
        let trust = trust.ok_or(StreamError::Untrusted)?;
        for piece in parts(pieces, offset, len.saturating_sub(offset)) {
            let claim = Claim::new(memory, piece, trust).ok_or(StreamError::Revoked)?;
            // `_access` keeps it from being moved, but not from being revoked.
            if core.leases().enter_to_write(index) == Entered::Moved {
                return Err(StreamError::Revoked);
            }
            let place = SlicePlace::Claimed(claim, Arc::clone(memory));
            out.push(LoanSlice { core, index, place });
        }
        Ok(())
    }

    /// Enters a buffer in place for writing; `None`: write to the private buffer.
    pub(super) fn enter(
        &mut self,
        core: &Core,
        filled: bool,
    ) -> Result<Option<&BufferPlace>, StreamError> {
        if self.place.is_some() && self.is_moved(core) {
            self.moved(core.lock().backend(), filled)?;
        }
        Ok(self.place.as_ref())
    }

    /// Prepares to send it under the lock. Returns whether it is in place; if not, its bytes are in
    /// the private buffer.
    pub(in crate::vsock) fn prepare_send(
        &mut self,
        core: &Core,
        backend: &mut dyn Backend,
        filled: bool,
    ) -> Result<bool, StreamError> {
        // The lock keeps the endpoint from moving it now.
        if self.place.is_some() && !core.leases().is_writable(self.index) {
            self.moved(backend, filled)?;
        }
        Ok(self.place.is_some())
    }

    /// Enters it for writing. True: the endpoint has moved it, and it is not entered.
    fn is_moved(&self, core: &Core) -> bool {
        core.leases().enter_to_write(self.index) == Entered::Moved
    }

    /// Makes the buffer private after the endpoint has moved it; takes what was written from the
    /// copy.
    fn moved(&mut self, backend: &mut dyn Backend, filled: bool) -> Result<(), StreamError> {
        match backend.copy_of(self.index) {
            Some((bytes, start)) => {
                let bytes = bytes.get(start..).unwrap_or(&[]);
                self.private.extend_from_slice(bytes);
            }
            None if filled => return Err(StreamError::Revoked),
            None => {}
        }
        self.private.resize(self.len, 0);
        self.place = None;
        Ok(())
    }

    /// The backend has the buffer back and may reuse its index and memory.
    pub(in crate::vsock) fn mark_returned(&mut self) {
        self.place = None;
        self.private.resize(self.len, 0);
    }
}

/// The parts of `pieces` that cover `len` bytes from `skip` on.
pub(super) fn parts(
    pieces: &[Piece],
    mut skip: usize,
    mut len: usize,
) -> impl Iterator<Item = Piece> {
    pieces.iter().filter_map(move |piece| {
        let part = piece.part(skip, len);
        skip = skip.saturating_sub(piece.len());
        len -= part.len();
        (!part.is_empty()).then_some(part)
    })
}
