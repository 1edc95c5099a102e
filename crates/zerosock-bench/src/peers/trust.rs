//! The only declaration of trust in this program.
#![allow(unsafe_code)]

use zerosock::vsock::Trust;

/// Trust in processes that run this program: they do not write leased bytes and do not read loaned
/// bytes. Without it every byte would be copied through a small buffer.
pub(crate) fn trust() -> Option<Trust> {
    // SAFETY: used only by measurements. They start the other side from this binary, or have it in this
    // process, with sealed memory that only the two sides map; both access leases and loans through the library only,
    // and hold no slice longer than its lease or loan.
    Some(unsafe { Trust::declare() })
}
