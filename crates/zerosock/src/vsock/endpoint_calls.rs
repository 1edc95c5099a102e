//! The public calls that endpoints of both kinds have, generated for each type.

/// Makes them for a type with the fields `core`, `wait` and `connect_timeout`, and the functions
/// `resolve` and `listen_for`.
macro_rules! endpoint_calls {
    ($endpoint:ident) => {
        impl $endpoint {
            /// Connects to `peer`.
            ///
            /// # Errors
            /// With a [`ConnectError`](crate::vsock::ConnectError) inside: `ConnectionRefused` when
            /// no socket listens there, and, at an [`Endpoint`](crate::vsock::Endpoint), when the
            /// CID does not exist; `HostUnreachable` for an address that no peer can have, when the
            /// device has gone, and, at a [`Host`](crate::vsock::Host), when there is no such CID or
            /// its guest has no driver yet; `TimedOut` without an answer within the time that the
            /// builder's `connect_timeout` has set; `AddrInUse` when no local port is left;
            /// `OutOfMemory` beyond the builder's `max_connections`. `ConnectionAborted` when the
            /// endpoint has failed.
            pub fn connect(&self, peer: Address) -> io::Result<Stream> {
                connect(&self.core, peer, self.wait, self.connect_timeout)
            }

            /// Sends the request and does not wait for the answer. While the stream is connecting,
            /// reads and writes block. On the answer [`Stream::wait_connected`] returns the result,
            /// and a [`Poller`](crate::vsock::Poller) reports the stream as writable.
            ///
            /// # Errors
            /// When the request cannot be sent, such as `HostUnreachable` for an address that no
            /// peer can have.
            pub fn begin_connect(&self, peer: Address) -> io::Result<Stream> {
                begin_connect(&self.core, peer, self.wait)
            }

            /// Connects to `port` of the attached process called `name`.
            ///
            /// # Errors
            /// Those of [`resolve`](Self::resolve) and [`connect`](Self::connect).
            pub fn connect_name(&self, name: &str, port: Port) -> io::Result<Stream> {
                self.connect(Address::new(self.resolve(name)?, port))
            }

            /// As [`connect`](Self::connect), for messages.
            ///
            /// # Errors
            /// As [`connect`](Self::connect); `Unsupported` when the device, or the guest, has none.
            pub fn connect_seqpacket(&self, peer: Address) -> io::Result<SeqPacket> {
                connect(&self.core, peer, self.wait, self.connect_timeout)
            }

            /// As [`begin_connect`](Self::begin_connect), for messages.
            ///
            /// # Errors
            /// As [`begin_connect`](Self::begin_connect); `Unsupported` when the device, or the
            /// guest, has none.
            pub fn begin_connect_seqpacket(&self, peer: Address) -> io::Result<SeqPacket> {
                begin_connect(&self.core, peer, self.wait)
            }

            /// Listens on `port` of the endpoint's CID, or with [`Port::ANY`] on a free one, which
            /// [`Listener::local_addr`] returns. As on Linux at most `backlog + 1` connections wait
            /// to be accepted; further ones are refused.
            ///
            /// # Errors
            /// With a [`BindError`](crate::vsock::BindError) inside: `AddrInUse` when another
            /// socket listens on the port or has bound it. At an
            /// [`Endpoint`](crate::vsock::Endpoint), `InvalidInput` for a port that no peer could
            /// reach: one that is not among the endpoint's
            /// [`ports`](crate::vsock::EndpointBuilder::ports), or that a service has not
            /// [claimed](crate::vsock::Endpoint::claim).
            pub fn listen(&self, port: Port, backlog: usize) -> io::Result<Listener> {
                self.listen_for(port, backlog, SocketType::Stream)
            }

            /// As [`listen`](Self::listen), for connections that carry messages. Streams are
            /// refused there; a port is listened on for one kind.
            ///
            /// # Errors
            /// As [`listen`](Self::listen).
            pub fn listen_seqpacket(
                &self,
                port: Port,
                backlog: usize,
            ) -> io::Result<SeqPacketListener> {
                let listener = self.listen_for(port, backlog, SocketType::SeqPacket)?;
                Ok(SeqPacketListener::new(listener))
            }

            /// Takes in received packets and runs due timers, without blocking. Only for programs
            /// that do not call their sockets for long. One that has no sockets, because it only
            /// joins VMs and processes to each other, is a [`Daemon`](crate::daemon::Daemon).
            ///
            /// # Errors
            /// `ConnectionAborted` when the endpoint has failed.
            pub fn drive(&self) -> io::Result<()> {
                self.core.lock().drive()?;
                Ok(())
            }

            /// Counters since the endpoint was opened.
            pub fn stats(&self) -> EndpointStats {
                self.core.lock().stats()
            }

            /// Whether later connections may have receive maps; default false. The SO_VM_SOCKETS_ZEROCOPY
            /// of the document that [`rxmap`](crate::vsock::rxmap) implements, which "could be enabled only
            /// for socket in SS_UNCONNECTED state".
            pub fn set_rx_map(&self, enabled: bool) {
                self.core.set_rx_map(enabled);
            }

            /// What a datagram socket needs of the endpoint.
            pub(super) fn core_and_wait(&self) -> (&Arc<Core>, Wait) {
                (&self.core, self.wait)
            }
        }

        impl AsFd for $endpoint {
            /// Readable when an event has occurred since a call answered `WouldBlock`.
            fn as_fd(&self) -> BorrowedFd<'_> {
                (*self.core).as_fd()
            }
        }

        impl AsRawFd for $endpoint {
            fn as_raw_fd(&self) -> RawFd {
                self.as_fd().as_raw_fd()
            }
        }
    };
}
pub(super) use endpoint_calls;
