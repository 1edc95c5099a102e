//! The party at fault for an error.

/// The party at fault for an error.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use zerosock::Cid;
/// use zerosock::vsock::{Endpoint, Fault};
///
/// let first = Endpoint::attach(&path)?;
/// // The CID belongs to another process: a fault of the caller.
/// let error = Endpoint::builder().cid(first.cid()).attach(&path).unwrap_err();
/// assert_eq!(error.fault(), Fault::Caller);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Fault {
    /// The other side: it broke the protocol, disconnected, or speaks another version.
    Peer,
    /// The caller: it requested something that belongs to others or is not allowed.
    Caller,
    /// The system, on either side, ran out of a resource or refused a call.
    System,
}
