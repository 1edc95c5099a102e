//! The errors of receive maps.

use std::io;

use crate::table::transfers::RecvFault;
use crate::vsock::errors::of_recv;
use crate::vsock::hub::WaitFault;

/// Why a call of a receive map failed. All except [`Io`](RxMapError::Io) are the caller's fault,
/// and nothing was changed.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use zerosock::vsock::RxMap;
/// use zerosock::vsock::rxmap::{RxMapConfig, RxMapError};
///
/// // The host did not enable maps before it accepted.
/// let error = RxMap::new(&host, RxMapConfig::default()).unwrap_err();
/// assert!(matches!(error, RxMapError::NotEnabled));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RxMapError {
    /// Receive maps were not enabled before the connection was made.
    #[error("receive maps were not enabled before the connection was made")]
    NotEnabled,
    /// Receive maps are enabled or disabled before a connection is made, not after.
    #[error("receive maps are enabled before a connection is made, not after")]
    Connected,
    /// A mapping that can be written or executed was asked for, or one that cannot be read.
    #[error("a receive map is mapped for reading only")]
    Protection,
    /// An invalid length.
    #[error("a receive map of {0} bytes: it has whole pages, headers first, then data")]
    Length(usize),
    /// The address is not that of this map.
    #[error("address {0:#x} is not the beginning of this map")]
    Address(usize),
    /// The range to release is not within the map.
    #[error("what is to be released does not lie in the map")]
    Range,
    /// Headers or pages of the last fill are not released.
    #[error("what the last fill gave is not released yet")]
    NotReleased,
    /// The connection or the endpoint: see its kind and source.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The result of a fill that found no packets. `Ok`: no headers, no error.
pub(super) fn of_nothing(fault: RecvFault) -> Result<(), RxMapError> {
    match of_recv(fault) {
        None => Ok(()),
        Some(error) => Err(RxMapError::Io(error.into())),
    }
}

impl From<WaitFault> for RxMapError {
    fn from(fault: WaitFault) -> RxMapError {
        RxMapError::Io(fault.into())
    }
}

impl From<RxMapError> for io::Error {
    fn from(error: RxMapError) -> io::Error {
        let kind = match error {
            RxMapError::Io(error) => return error,
            RxMapError::Protection => io::ErrorKind::PermissionDenied,
            RxMapError::NotReleased => io::ErrorKind::ResourceBusy,
            _ => io::ErrorKind::InvalidInput,
        };
        io::Error::new(kind, error)
    }
}
