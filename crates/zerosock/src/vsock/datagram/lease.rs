//! Received datagrams, read in place.

use std::fmt;
use std::io;

use zerosock_proto::Address;

use super::Datagram;
use crate::vsock::lease::{Lease, OwnedLease};

/// A received datagram, read where the sender's side wrote it. Dropping it returns the buffer.
///
/// ```
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use zerosock::vsock::Datagram;
/// use zerosock::Port;
///
/// let ours = Datagram::bind(&db, Port::new(514))?;
/// let theirs = Datagram::bind(&web, Port::ANY)?;
/// theirs.send_to(b"in place", ours.local_addr())?;
/// let datagram = ours.recv_lease()?;
/// assert_eq!(datagram.source(), theirs.local_addr());
/// assert_eq!(datagram.to_vec(), b"in place");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It cannot outlive its socket:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::Datagram;
/// fn lease_outlives_socket(socket: Datagram) {
///     let datagram = socket.recv_lease().unwrap();
///     drop(socket);
///     println!("{}", datagram.len());
/// }
/// ```
pub struct DatagramLease<'a> {
    source: Address,
    /// `None`: it is empty.
    lease: Option<Lease<'a>>,
}

impl<'a> DatagramLease<'a> {
    /// The address of its sender.
    pub fn source(&self) -> Address {
        self.source
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.lease.as_ref().map_or(0, Lease::len)
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.lease.is_none()
    }

    /// Whether the bytes lie where the sender's side wrote them. False for a copy: beyond the hold
    /// limit, or of a datagram of several packets.
    pub fn is_in_place(&self) -> bool {
        self.lease.as_ref().is_some_and(Lease::is_in_place)
    }

    /// Its bytes as a lease. `None`: it is empty.
    pub fn lease(&self) -> Option<&Lease<'a>> {
        self.lease.as_ref()
    }

    /// Its bytes as a lease that may outlive the socket. `None`: it is empty.
    pub fn into_owned(self) -> Option<OwnedLease> {
        self.lease.map(Lease::into_owned)
    }

    /// Copies bytes from `offset` on to `out`; returns how many. Safe with any peer.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> usize {
        let lease = self.lease.as_ref();
        lease.map_or(0, |lease| lease.copy_to(offset, out))
    }

    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        self.lease.as_ref().map(Lease::to_vec).unwrap_or_default()
    }
}

impl Datagram {
    /// Receives the next datagram in place.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from); `OutOfMemory` at the endpoint's limit of leases.
    pub fn recv_lease(&self) -> io::Result<DatagramLease<'_>> {
        let (got, trusted) = self.receive(|backend| {
            let got = backend.lease(self.id)?;
            let trusted = backend.trusts(got.pool);
            Ok((got, trusted))
        })?;
        let trust = self.core.trust().filter(|_| trusted);
        let lease = got.parts.map(|parts| Lease::new(&self.core, parts, trust));
        Ok(DatagramLease {
            source: got.source,
            lease,
        })
    }
}

impl fmt::Debug for DatagramLease<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatagramLease")
            .field("source", &self.source)
            .field("len", &self.len())
            .field("in_place", &self.is_in_place())
            .finish_non_exhaustive()
    }
}
