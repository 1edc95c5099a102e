//! A lease as the owner of a `Bytes`; its clones read it on any thread.

use super::{OwnedLease, Reading};
use crate::table::sockets::{BufferPlace, Copied};

/// An owned lease that keeps its bytes in place: the owner of a `Bytes`.
pub(super) struct Shared {
    lease: OwnedLease,
    /// The bytes, if the endpoint had moved them before.
    copy: Option<Copied>,
    /// The lease is entered: its bytes stay in place until the drop.
    pub(super) entered: bool,
}

impl Shared {
    pub(super) fn new(lease: OwnedLease) -> Shared {
        // The reading ends in the drop of `Shared`.
        let mut reading = std::mem::ManuallyDrop::new(lease.read());
        let (copy, entered) = (reading.copy.take(), reading.entered);
        Shared {
            lease,
            copy,
            entered,
        }
    }

    pub(super) fn reading(&self) -> std::mem::ManuallyDrop<Reading<'_>> {
        std::mem::ManuallyDrop::new(Reading {
            core: &self.lease.core,
            body: &self.lease.body,
            copy: self.copy.clone(),
            entered: self.entered,
        })
    }
}

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        if let Some((bytes, start)) = &self.copy {
            return bytes
                .get(*start..*start + self.lease.body.len)
                .unwrap_or(&[]);
        }
        match &self.lease.body.place {
            BufferPlace::Copied((bytes, start)) => bytes
                .get(*start..*start + self.lease.body.len)
                .unwrap_or(&[]),
            BufferPlace::InPlace {
                memory,
                pieces,
                offset,
            } => match (&pieces[..], self.lease.body.trust.filter(|_| self.entered)) {
                ([piece], Some(trust)) => memory
                    .trusted_slice(piece.part(*offset, self.lease.body.len), trust)
                    .unwrap_or(&[]),
                _ => &[],
            },
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        drop(std::mem::ManuallyDrop::into_inner(self.reading()));
    }
}
