//! One buffer on loan: where its holder writes, wherever that is now.
//!
//! What must hold: nothing is written where the endpoint has taken the place away; who writes has
//! entered, and leaves.

use std::sync::Arc;

use zerosock_ring::{Claim, Piece, Trust};

use super::{Filling, FillingPlace};
use crate::table::backend::{Backend, LoanParts};
use crate::table::leases::Entered;
use crate::table::sockets::BufferPlace;
use crate::vsock::errors::StreamError;
use crate::vsock::hub::Core;

/// See the module.
#[derive(Debug)]
pub(in crate::vsock) struct Buffer {
    /// Its word; of what was private from the first, perhaps none.
    pub(super) index: u32,
    pub(super) len: usize,
    pub(super) place: Option<BufferPlace>,
    /// The bytes of one that is not in place (any more).
    pub(super) private: Vec<u8>,
}

/// A buffer is being written to, as long as this lives.
pub(super) struct Inside<'a> {
    pub(super) core: &'a Core,
    pub(super) index: u32,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.core.leave(self.index);
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

    /// Bytes that it takes.
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

    /// Writes `bytes` at `offset`; how many fitted. `filled`: whether anything was written before.
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
            Some(BufferPlace::InPlace {
                memory,
                pieces,
                offset: start,
            }) => {
                let written = memory.write(pieces, start + offset, bytes);
                core.leave(index);
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

    /// Slices of its bytes from `offset` on: one for each piece that they lie in.
    pub(in crate::vsock) fn fillings<'l>(
        &'l mut self,
        core: &'l Core,
        trust: Option<Trust>,
        offset: usize,
        filled: bool,
        out: &mut Vec<Filling<'l>>,
    ) -> Result<(), StreamError> {
        let (index, len) = (self.index, self.len);
        if self.enter(core, filled)?.is_none() {
            let bytes = self.private.get_mut(offset..).unwrap_or(&mut []);
            let place = FillingPlace::Private(bytes);
            out.push(Filling { core, index, place });
            return Ok(());
        }
        // Each slice enters for itself; this one leaves when all have.
        let _inside = Inside { core, index };
        let Some(BufferPlace::InPlace {
            memory,
            pieces,
            offset: start,
        }) = &self.place
        else {
            return Err(StreamError::Torn);
        };
        let trust = trust.ok_or(StreamError::Untrusted)?;
        for piece in parts(pieces, start + offset, len.saturating_sub(offset)) {
            let claim = Claim::new(memory, piece, trust).ok_or(StreamError::Torn)?;
            // It cannot be moved: we are in it already. Torn it may be, meanwhile.
            if core.leases().enter_to_write(index) == Entered::Moved {
                return Err(StreamError::Torn);
            }
            let place = FillingPlace::Claimed(claim, Arc::clone(memory));
            out.push(Filling { core, index, place });
        }
        Ok(())
    }

    /// Begins to write where it is in place; `None`: into the private buffer.
    pub(super) fn enter(
        &mut self,
        core: &Core,
        filled: bool,
    ) -> Result<Option<&BufferPlace>, StreamError> {
        if self.place.is_some() && self.is_moved(core) {
            self.moved(core.lock().engine(), filled)?;
        }
        Ok(self.place.as_ref())
    }

    /// Whether it is in place, to be sent now; if not, what was written is private.
    pub(in crate::vsock) fn settle(
        &mut self,
        core: &Core,
        engine: &mut dyn Backend,
        filled: bool,
    ) -> Result<bool, StreamError> {
        if self.place.is_some() {
            if self.is_moved(core) {
                self.moved(engine, filled)?;
            } else {
                // Not by way of the core: the lock is ours, and is given back soon.
                core.leases().leave(self.index);
            }
        }
        Ok(self.place.is_some())
    }

    /// Enters it, unless the endpoint has taken its place away.
    fn is_moved(&self, core: &Core) -> bool {
        core.leases().enter_to_write(self.index) == Entered::Moved
    }

    /// The endpoint has taken the place away: what was written is in a copy, if there is one.
    fn moved(&mut self, engine: &mut dyn Backend, filled: bool) -> Result<(), StreamError> {
        match engine.copy_of(self.index) {
            Some((bytes, start)) => {
                let bytes = bytes.get(start..).unwrap_or(&[]);
                self.private.extend_from_slice(bytes);
            }
            None if filled => return Err(StreamError::Torn),
            None => {}
        }
        self.private.resize(self.len, 0);
        self.place = None;
        Ok(())
    }

    /// The engine has it back: its word and its place are somebody else's.
    pub(in crate::vsock) fn forget_place(&mut self) {
        self.place = None;
        self.private.resize(self.len, 0);
    }
}

/// What of `pieces` is `len` bytes from `skip` on.
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
