//! An endpoint of either kind, as an argument.

use std::sync::Arc;

use super::endpoint::Endpoint;
use super::host::Host;
use super::hub::Core;
use super::waiting::Wait;

/// An [`Endpoint`] or a [`Host`]: where a [`Datagram`](super::Datagram) socket is bound, or what an asynchronous
/// socket connects from.
///
/// ```
/// # let (db, _web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use zerosock::Port;
/// use zerosock::vsock::{Datagram, EndpointRef};
///
/// /// Works for endpoints and hosts.
/// fn log<'a>(at: impl Into<EndpointRef<'a>>) -> std::io::Result<Datagram> {
///     Datagram::bind(at, Port::new(514))
/// }
/// assert_eq!(log(&db)?.local_addr().cid, db.cid());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug)]
pub struct EndpointRef<'a>(Kind<'a>);

#[derive(Copy, Clone, Debug)]
enum Kind<'a> {
    Endpoint(&'a Endpoint),
    Host(&'a Host),
    #[cfg(test)]
    Core(&'a Arc<Core>),
}

impl<'a> EndpointRef<'a> {
    pub(super) fn core_and_wait(self) -> (&'a Arc<Core>, Wait) {
        match self.0 {
            Kind::Endpoint(endpoint) => endpoint.core_and_wait(),
            Kind::Host(host) => host.core_and_wait(),
            #[cfg(test)]
            Kind::Core(core) => (core, Wait::Sleep),
        }
    }

    /// The endpoint, which may limit the ports; `None` for a host.
    pub(super) fn endpoint(self) -> Option<&'a Endpoint> {
        match self.0 {
            Kind::Endpoint(endpoint) => Some(endpoint),
            _ => None,
        }
    }
}

#[cfg(feature = "tokio")]
mod connecting {
    use std::io;

    use zerosock_proto::{Address, Cid};

    use super::{EndpointRef, Kind};
    use crate::vsock::connecting::begin_connect;
    use crate::vsock::connection::Connected;

    /// Resolves a name to a CID; may block for the attach socket's answer.
    type Resolver = Box<dyn FnOnce() -> io::Result<Cid> + Send>;

    impl EndpointRef<'_> {
        pub(in crate::vsock) fn begin_connect<S: Connected>(self, peer: Address) -> io::Result<S> {
            let (core, wait) = self.core_and_wait();
            begin_connect(core, peer, wait)
        }

        pub(in crate::vsock) fn resolver(self, name: &str) -> Resolver {
            if let Kind::Host(host) = self.0 {
                let cid = host.resolve(name);
                return Box::new(move || cid);
            }
            let (core, name) = (self.core_and_wait().0.clone(), name.to_owned());
            Box::new(move || crate::vsock::endpoint::resolve(&core, &name))
        }
    }
}

impl<'a> From<&'a Endpoint> for EndpointRef<'a> {
    fn from(endpoint: &'a Endpoint) -> EndpointRef<'a> {
        EndpointRef(Kind::Endpoint(endpoint))
    }
}

impl<'a> From<&'a Host> for EndpointRef<'a> {
    fn from(host: &'a Host) -> EndpointRef<'a> {
        EndpointRef(Kind::Host(host))
    }
}

#[cfg(test)]
impl<'a> From<&'a Arc<Core>> for EndpointRef<'a> {
    fn from(core: &'a Arc<Core>) -> EndpointRef<'a> {
        EndpointRef(Kind::Core(core))
    }
}
