//! The handle of the thread that drives an endpoint on request.

use std::sync::Arc;

use super::descriptors::EventFd;

/// Ends the thread when it is dropped, with the endpoint.
#[derive(Debug)]
pub(crate) struct Background(pub(crate) Arc<EventFd>);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.signal();
    }
}
