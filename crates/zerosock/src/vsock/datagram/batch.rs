//! Many datagrams in one call, with one lock of the endpoint and one notification of its peer.

use std::io;

use zerosock_proto::Address;

use super::{Datagram, RecvFault};
use crate::vsock::message::Message;

impl Datagram {
    /// Sends as many of `datagrams` as there is room for, in order, each to its address; returns
    /// how many. Blocks for the first one only. The call stops at a datagram that cannot be sent;
    /// it returns the error only for the first one.
    ///
    /// ```
    /// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
    /// use zerosock::vsock::Datagram;
    /// use zerosock::Port;
    ///
    /// let ours = Datagram::bind(&db, Port::new(514))?;
    /// let theirs = Datagram::bind(&web, Port::ANY)?;
    /// let to = ours.local_addr();
    /// assert_eq!(theirs.send_many(&[("one", to), ("two", to), ("three", to)])?, 3);
    ///
    /// let mut buffers = [[0; 8]; 4];
    /// let mut got = Vec::new();
    /// while got.len() < 3 {
    ///     let first = got.len();
    ///     got.extend(ours.recv_many(&mut buffers[first..])?);
    /// }
    /// assert_eq!(got, [3, 3, 5].map(|len| (len, theirs.local_addr())));
    /// assert_eq!(&buffers[2][..5], b"three");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub fn send_many<B: AsRef<[u8]>>(&self, datagrams: &[(B, Address)]) -> io::Result<usize> {
        self.send_each(datagrams.iter().map(|(bytes, to)| (bytes.as_ref(), *to)))
    }

    /// As [`send_many`](Self::send_many), all to the [connected](Self::connect) peer.
    ///
    /// # Errors
    /// As there; `NotConnected`.
    pub fn send_all<B: AsRef<[u8]>>(&self, datagrams: &[B]) -> io::Result<usize> {
        let to = self.peer()?;
        self.send_each(datagrams.iter().map(|bytes| (bytes.as_ref(), to)))
    }

    #[inline]
    fn send_each<'d>(
        &self,
        datagrams: impl ExactSizeIterator<Item = (&'d [u8], Address)> + Clone,
    ) -> io::Result<usize> {
        if datagrams.len() == 0 {
            return Ok(0);
        }
        self.transmit(|backend| {
            let mut sent = 0;
            for (bytes, to) in datagrams.clone() {
                match backend.send(self.id, to, bytes) {
                    Ok(()) => sent += 1,
                    Err(fault) if sent == 0 => return Err(fault),
                    Err(_) => break,
                }
            }
            Ok(sent)
        })
    }

    /// Receives the datagrams that have arrived, one into each of `buffers`; returns the full
    /// length and the source of each, as [`recv_from`](Self::recv_from) does. Blocks for the first
    /// one only.
    ///
    /// # Errors
    /// As there.
    pub fn recv_many<B: AsMut<[u8]>>(
        &self,
        buffers: &mut [B],
    ) -> io::Result<Vec<(usize, Address)>> {
        if buffers.is_empty() {
            return Ok(Vec::new());
        }
        self.receive(|backend| {
            let mut all = Vec::new();
            for buffer in &mut *buffers {
                match backend.recv(self.id, buffer.as_mut(), false) {
                    Some(got) => all.push((got.len, got.source)),
                    None if all.is_empty() => return Err(RecvFault::WouldBlock),
                    None => break,
                }
            }
            Ok(all)
        })
    }

    /// Receives up to `most` datagrams: calls `look` with each, in place, and its source. Returns
    /// how many. Blocks for the first one only. Made for many small datagrams: without a copy and
    /// without leases. `look` may drop sockets and leases, but must not call this endpoint.
    ///
    /// ```
    /// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
    /// use zerosock::vsock::Datagram;
    /// use zerosock::Port;
    ///
    /// let ours = Datagram::bind(&db, Port::new(514))?;
    /// let theirs = Datagram::bind(&web, Port::ANY)?;
    /// theirs.send_to(b"shown", ours.local_addr())?;
    /// let seen = ours.recv_each(64, |datagram, source| {
    ///     assert_eq!((datagram.to_vec(), source), (b"shown".to_vec(), theirs.local_addr()));
    /// })?;
    /// assert_eq!(seen, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    ///
    /// # Panics
    /// When `look` makes a call of this endpoint.
    pub fn recv_each(
        &self,
        most: usize,
        mut look: impl FnMut(Message<'_>, Address),
    ) -> io::Result<usize> {
        if most == 0 {
            return Ok(0);
        }
        let trust = self.core.trust();
        self.receive(|backend| {
            let seen = backend.consume_in_place(self.id, most, &mut |source, payload, trusted| {
                look(Message::new(payload, trust.filter(|_| trusted)), source);
                true
            });
            match seen {
                0 => Err(RecvFault::WouldBlock),
                seen => Ok(seen),
            }
        })
    }
}
