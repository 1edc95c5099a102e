//! The entries of leases and loans that are out.
//!
//! # Invariants
//! - A free entry and a loan have neither a buffer nor a copy here.
//! - A lease is in its pool's list while it has a buffer.

use super::ids::StreamId;
use super::received::HeldBuffer;
use crate::table::leases::NONE;
use crate::table::places::Copied;

/// A lease or loan that is out.
#[derive(Debug)]
pub(crate) struct LentEntry<T> {
    pub(super) kind: LentKind,
    /// The connection, which may have been removed.
    pub(super) conn: Option<StreamId>,
    /// The pool of the buffer; `NONE`: the lease is a copy without a connection.
    pub(super) pool: u32,
    pub(super) len: u32,
    /// The buffer, while the lease is in place.
    pub(super) held: Option<HeldBuffer<T>>,
    /// The copy, after the bytes were moved.
    pub(super) copy: Option<Copied>,
    /// Position in the pool's list of leases, while the lease is in place.
    pub(super) place: u32,
    /// The lease is to be moved, but had a reader.
    pub(super) overdue: bool,
}

/// What an entry is used for.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(super) enum LentKind {
    #[default]
    Nothing,
    Lease,
    Loan,
}

impl<T> Default for LentEntry<T> {
    fn default() -> LentEntry<T> {
        LentEntry {
            kind: LentKind::Nothing,
            conn: None,
            pool: NONE,
            len: 0,
            held: None,
            copy: None,
            place: 0,
            overdue: false,
        }
    }
}
