//! The payload and the descriptors of a request, for its handler.

use std::sync::Arc;

use vhost::vhost_user::message::VhostUserU64;
use vm_memory::ByteValued;
use zerosock_sys::PeerFd;

use super::super::fds::SentFd;
use super::super::stats::FrontendFault;
use super::state::Denied;

/// A request's payload and descriptors, after the checks of its rule.
pub(super) struct Arguments<'a> {
    pub(super) payload: &'a [u8],
    pub(super) fds: Vec<SentFd>,
}

impl Arguments<'_> {
    /// The structure at the beginning of the payload.
    pub(super) fn body<T: ByteValued + Default>(&self) -> Result<T, Denied> {
        body(self.payload)
    }

    /// The number that is the payload.
    pub(super) fn u64(&self) -> Result<u64, Denied> {
        Ok(self.body::<VhostUserU64>()?.value)
    }
}

/// The structure at the beginning of `payload`.
pub(super) fn body<T: ByteValued + Default>(payload: &[u8]) -> Result<T, Denied> {
    let mut body = T::default();
    let bytes = payload.get(..size_of::<T>()).ok_or_else(|| {
        (
            FrontendFault::Payload,
            format!("a payload of only {} bytes", payload.len()),
        )
    })?;
    body.as_mut_slice().copy_from_slice(bytes);
    Ok(body)
}

/// A descriptor that must be memory.
pub(super) fn memory_file(fd: SentFd) -> Result<Arc<PeerFd>, Denied> {
    let file = fd
        .memory()
        .map_err(|text| (FrontendFault::Descriptors, text))?;
    Ok(Arc::new(file))
}
