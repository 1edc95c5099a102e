//! Paths that stay within reach.

use crate::socket_path::walk::Traced;

/// What a path is used for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Use {
    Write,
    Device,
    Read,
}

/// A path that exists.
pub(super) struct Place {
    pub(super) used_for: Use,
    pub(super) traced: Traced,
}
