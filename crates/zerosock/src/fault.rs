//! Which side is at fault.

/// Who is to blame for an error.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use zerosock::Cid;
/// use zerosock::vsock::{Endpoint, Fault};
///
/// let first = Endpoint::attach(&path)?;
/// // To ask for what another one has is no fault of his.
/// let error = Endpoint::builder().cid(first.cid()).attach(&path).unwrap_err();
/// assert_eq!(error.fault(), Fault::Caller);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Fault {
    /// The other side: it broke the protocol, went away, or speaks another version.
    Peer,
    /// Whoever asked: for what belongs to others, or is not allowed.
    Caller,
    /// The system, here or there, had nothing to give.
    System,
}
