//! Slices of lent buffers, for writing.

use std::fmt;
use std::io::IoSliceMut;
use std::sync::Arc;

use zerosock_ring::Claim;

use crate::vsock::hub::Core;

/// A loan's bytes as a plain slice.
///
/// ```
/// use std::io::Read;
///
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// let mut loan = process.loan(100)?;
/// let mut slice = loan.as_mut_slice()?;
/// let len = (&b"from a reader"[..]).read_vectored(&mut slice.as_io_slices())?;
/// drop(slice);
/// loan.set_filled(len);
/// loan.send()?;
/// assert_eq!(host.recv()?.expect("a packet").to_vec(), b"from a reader");
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// It borrows the loan, which can neither be sent nor written otherwise meanwhile:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::Loan;
/// fn filled_after_send(mut loan: Loan<'_>) {
///     let mut slice = loan.as_mut_slice().unwrap();
///     loan.send().unwrap();
///     slice[0] = 1;
/// }
/// ```
pub struct LoanSlice<'l> {
    pub(super) core: &'l Core,
    pub(super) index: u32,
    pub(super) place: SlicePlace<'l>,
}

pub(super) enum SlicePlace<'l> {
    Private(&'l mut [u8]),
    Claimed(Claim, Arc<zerosock_ring::Memory>),
}

impl LoanSlice<'_> {
    /// The bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.place {
            SlicePlace::Private(bytes) => bytes,
            SlicePlace::Claimed(claim, memory) => claim.slice_mut(memory).unwrap_or(&mut []),
        }
    }

    /// The bytes, for `readv(2)` and its like.
    pub fn as_io_slices(&mut self) -> [IoSliceMut<'_>; 1] {
        [IoSliceMut::new(self.as_mut_slice())]
    }
}

impl std::ops::Deref for LoanSlice<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.place {
            SlicePlace::Private(bytes) => bytes,
            SlicePlace::Claimed(claim, memory) => claim.slice(memory).unwrap_or(&[]),
        }
    }
}

impl std::ops::DerefMut for LoanSlice<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

impl Drop for LoanSlice<'_> {
    fn drop(&mut self) {
        if matches!(self.place, SlicePlace::Claimed(..)) {
            self.core.end_access(self.index);
        }
    }
}

impl fmt::Debug for LoanSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoanSlice")
            .field("len", &self.len())
            .finish()
    }
}
