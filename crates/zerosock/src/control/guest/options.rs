//! Which endpoints a guest may have on its pages.

use super::key::GuestKey;
use crate::routing::name::Name;

/// Which endpoints the guest of a VM may have on its pages. By default a VM may have none.
///
/// ```
/// use zerosock::daemon::{GuestEndpoints, GuestKey};
///
/// # let key = [7; 32];
/// let mut endpoints = GuestEndpoints::new(GuestKey::new(&key)?);
/// endpoints.most = 4;
/// endpoints.names = vec!["web".parse()?];
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GuestEndpoints {
    /// The secret that the agent in the guest has, too. With [`GuestKey::none`], every process of the guest that may bind
    /// a port below 1024, as containers may by default, can read and write all memory of the guest.
    pub key: GuestKey,
    /// The largest number of endpoints at a time.
    pub most: usize,
    /// Bytes of guest memory that all of them together may have.
    pub memory: u64,
    /// The names that they may have. An endpoint needs none.
    pub names: Vec<Name>,
}

impl GuestEndpoints {
    /// Up to 16 endpoints without names, with 1 GiB together.
    pub fn new(key: GuestKey) -> GuestEndpoints {
        GuestEndpoints {
            key,
            most: 16,
            memory: 1 << 30,
            names: Vec::new(),
        }
    }
}
