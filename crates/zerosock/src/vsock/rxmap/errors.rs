//! What can go wrong with a receive map, by whose fault it is.

use std::io;

use crate::table::backend::RecvFault;
use crate::vsock::errors::of_recv;
use crate::vsock::hub::WaitFault;

/// Why a receive map does not do what was asked. But for [`Io`](RxMapError::Io), all of them are
/// mistakes of the caller, and nothing was changed.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use zerosock::vsock::RxMap;
/// use zerosock::vsock::rxmap::{RxMapConfig, RxMapError};
///
/// // The host did not ask for maps before it accepted.
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
    /// A length that is no map's.
    #[error("a receive map of {0} bytes: it has whole pages, headers first, then data")]
    Length(usize),
    /// The address is not the one of this map.
    #[error("address {0:#x} is not the beginning of this map")]
    Address(usize),
    /// What was to be released does not lie in the map.
    #[error("what is to be released does not lie in the map")]
    Range,
    /// The map still has what the last fill gave.
    #[error("what the last fill gave is not released yet")]
    NotReleased,
    /// The connection or the endpoint: see its kind and source.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// How a fill ends that found nothing. `Ok`: with no headers.
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
