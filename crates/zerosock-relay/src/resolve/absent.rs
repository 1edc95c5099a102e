//! In place of the resolver, in builds without the feature `names`.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::answer::{Family, LookupError, LookupResult};
use crate::target::DomainName;

/// No resolver.
pub(crate) struct System;

impl System {
    pub(crate) fn new(
        _name_servers: Vec<SocketAddr>,
        _resolv_conf: PathBuf,
        _hosts: PathBuf,
    ) -> Self {
        System
    }

    pub(super) async fn query(&self, _name: &DomainName, _family: Family) -> LookupResult {
        Err(LookupError::NotSupported)
    }
}
