//! Received messages, read in place.

use std::fmt;
use std::sync::Arc;

use zerosock_ring::Trust;

use crate::table::sockets::LeaseParts;
use crate::vsock::hub::Core;
use crate::vsock::lease::Lease;

/// A received message in place: a [`Lease`] for each of its packets, in order; none for an empty
/// message.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/messages.rs"));
/// process.send(&[7; 100_000])?;
/// let message = host.recv_leases()?.expect("a message");
/// assert_eq!(message.len(), 100_000);
/// assert!(message.is_in_place());
/// let mut somewhere = [0; 4];
/// assert_eq!(message.copy_to(65_534, &mut somewhere), 4);
/// for lease in &message {
///     assert!(lease.to_vec().iter().all(|&byte| byte == 7));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It cannot outlive its connection:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::SeqPacket;
/// fn message_outlives_connection(connection: SeqPacket) {
///     let message = connection.recv_leases().unwrap().unwrap();
///     drop(connection);
///     println!("{}", message.len());
/// }
/// ```
pub struct MessageLeases<'a> {
    leases: Vec<Lease<'a>>,
    len: usize,
    end_of_record: bool,
}

impl<'a> MessageLeases<'a> {
    pub(super) fn new(
        core: &'a Arc<Core>,
        parts: Vec<LeaseParts>,
        trust: Option<Trust>,
        end_of_record: bool,
    ) -> MessageLeases<'a> {
        let lease = |parts| Lease::new(core, parts, trust);
        let leases: Vec<Lease<'a>> = parts.into_iter().map(lease).collect();
        MessageLeases {
            len: leases.iter().map(Lease::len).sum(),
            leases,
            end_of_record,
        }
    }

    /// The message's length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the message is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it ends a record: MSG_EOR.
    pub fn end_of_record(&self) -> bool {
        self.end_of_record
    }

    /// Whether all of it lay where the peer's side wrote it when it was received. False if any
    /// packet was beyond the hold limit, and is a copy.
    pub fn is_in_place(&self) -> bool {
        self.leases.iter().all(Lease::is_in_place)
    }

    /// Its parts, in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Lease<'a>> {
        self.leases.iter()
    }

    /// Copies bytes from `offset` on to `out`, across its parts; how many. Safe with any peer.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> usize {
        let (mut skip, mut done) = (offset, 0);
        for lease in &self.leases {
            if skip < lease.len() {
                let rest = out.get_mut(done..).unwrap_or(&mut []);
                done += lease.copy_to(skip, rest);
            }
            skip = skip.saturating_sub(lease.len());
        }
        done
    }

    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(0, &mut bytes);
        bytes
    }
}

impl<'m, 'a> IntoIterator for &'m MessageLeases<'a> {
    type Item = &'m Lease<'a>;
    type IntoIter = std::slice::Iter<'m, Lease<'a>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a> IntoIterator for MessageLeases<'a> {
    type Item = Lease<'a>;
    type IntoIter = std::vec::IntoIter<Lease<'a>>;

    /// The leases, to be dropped one by one.
    fn into_iter(self) -> Self::IntoIter {
        self.leases.into_iter()
    }
}

impl fmt::Debug for MessageLeases<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageLeases")
            .field("len", &self.len)
            .field("parts", &self.leases.len())
            .field("in_place", &self.is_in_place())
            .finish_non_exhaustive()
    }
}
