//! What async sockets connect from.

use std::io;

use zerosock_proto::Address;

use crate::vsock::endpoint::Endpoint;
use crate::vsock::host::Host;
use crate::vsock::seqpacket::SeqPacket;
use crate::vsock::stream::Stream;

/// An [`Endpoint`] or a [`Host`] that async sockets connect from.
pub trait Connector: sealed::Connect {}

impl Connector for Endpoint {}
impl Connector for Host {}

pub(super) mod sealed {
    use super::*;
    use zerosock_proto::Cid;

    /// Resolves a name to a CID; may block for the attach socket's answer.
    pub(in crate::vsock::tokio) type Resolver = Box<dyn FnOnce() -> io::Result<Cid> + Send>;

    pub trait Connect {
        fn begin(&self, peer: Address) -> io::Result<Stream>;
        fn begin_messages(&self, peer: Address) -> io::Result<SeqPacket>;
        fn resolver(&self, name: &str) -> Resolver;
    }

    impl Connect for Endpoint {
        fn begin(&self, peer: Address) -> io::Result<Stream> {
            self.begin_connect(peer)
        }

        fn begin_messages(&self, peer: Address) -> io::Result<SeqPacket> {
            self.begin_connect_seqpacket(peer)
        }

        fn resolver(&self, name: &str) -> Resolver {
            let (core, name) = (self.core.clone(), name.to_owned());
            Box::new(move || crate::vsock::endpoint::resolve(&core, &name))
        }
    }

    impl Connect for Host {
        fn begin(&self, peer: Address) -> io::Result<Stream> {
            self.begin_connect(peer)
        }

        fn begin_messages(&self, peer: Address) -> io::Result<SeqPacket> {
            self.begin_connect_seqpacket(peer)
        }

        fn resolver(&self, name: &str) -> Resolver {
            let cid = self.resolve(name);
            Box::new(move || cid)
        }
    }
}
