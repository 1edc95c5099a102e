//! The public calls that all connected sockets have, generated for each type.

/// Makes the calls that all connected sockets have, for a type with a field `conn`.
macro_rules! connection_calls {
    ($socket:ident) => {
        waiting_calls!($socket, conn);

        impl $socket {
            /// The local address.
            pub fn local_addr(&self) -> Address {
                self.conn.local
            }

            /// The peer's address.
            pub fn peer_addr(&self) -> Address {
                self.conn.peer
            }

            /// Whether leases and loans give plain slices: the application has declared trust in
            /// such peers.
            pub fn is_trusted(&self) -> bool {
                self.conn.trust.is_some()
            }

            /// Waits, as a receive would, for the answer to
            /// [`begin_connect`](crate::vsock::Endpoint::begin_connect) or
            /// [`begin_connect_seqpacket`](crate::vsock::Endpoint::begin_connect_seqpacket).
            ///
            /// # Errors
            /// `WouldBlock`; `TimedOut` after the read time-out. Else a
            /// [`ConnectError`](crate::vsock::ConnectError) is the source.
            pub fn wait_connected(&self) -> io::Result<()> {
                self.conn.wait_connected()
            }

            /// Shuts down one direction or both. What was sent before still arrives; then the peer
            /// receives the end. After [`Shutdown::Read`] blocked and later receives return the end;
            /// what is unread is discarded, leases stay valid.
            ///
            /// # Errors
            /// `NotConnected` when the connection has ended already.
            pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
                self.conn.shutdown(how)
            }

            /// Resets the connection: data in flight is lost, and the peer reads a reset.
            pub fn reset(self) {
                self.conn.reset();
            }

            /// The state of the connection as of the last turn of the backend.
            pub fn state(&self) -> StreamState {
                self.conn.state()
            }

            /// Bytes that the connection has received and sent, in place and copied.
            pub fn stats(&self) -> ConnectionStats {
                self.conn.stats()
            }

            /// The smallest and the largest receive buffer, in bytes.
            pub fn buffer_bounds(&self) -> (u32, u32) {
                self.conn.options().bounds()
            }

            /// The receive buffer in bytes (SO_VM_SOCKETS_BUFFER_SIZE).
            pub fn buffer_size(&self) -> u32 {
                self.conn.buffer_size()
            }

            /// How long a read or receive may wait; `None`: without limit.
            ///
            /// # Errors
            /// With an [`OptionError`](crate::vsock::OptionError) inside: `InvalidInput` for a time
            /// of zero, as in `std::net`.
            pub fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
                self.conn.set_read_timeout(time)
            }

            /// How long a read or receive may wait.
            pub fn read_timeout(&self) -> Option<Duration> {
                self.conn.options().read_timeout
            }

            /// How long a write, a send or a loan may wait; `None`: without limit.
            ///
            /// # Errors
            /// With an [`OptionError`](crate::vsock::OptionError) inside: `InvalidInput` for a time
            /// of zero, as in `std::net`.
            pub fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
                self.conn.set_write_timeout(time)
            }

            /// How long a write, a send or a loan may wait.
            pub fn write_timeout(&self) -> Option<Duration> {
                self.conn.options().write_timeout
            }

            /// What happens to sent data when the socket is dropped or [closed](Self::close)
            /// (SO_LINGER).
            ///
            /// - `None`, the default: it still arrives; closing does not wait.
            /// - A time: closing waits that long until the peer has consumed all data and
            ///   acknowledged the close; data that it has not consumed by then still arrives. A
            ///   [non-blocking](Self::set_nonblocking) socket closes as with `None`. Between two
            ///   processes or guests of one device it is the device that consumes the data: it is
            ///   in the peer's buffers then, or the device delivers it without this socket.
            /// - [`Duration::ZERO`]: the connection is reset, and data in flight is lost.
            pub fn set_linger(&self, linger: Option<Duration>) {
                self.conn.options().linger = linger;
            }

            /// See [`set_linger`](Self::set_linger).
            pub fn linger(&self) -> Option<Duration> {
                self.conn.options().linger
            }

            /// Closes the connection as dropping the socket does, and returns the result.
            ///
            /// ```
            /// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
            /// use std::io::{ErrorKind, Read, Write};
            /// use std::time::Duration;
            ///
            /// (&process).write_all(b"read me")?;
            /// process.set_linger(Some(Duration::from_millis(10)));
            /// // The peer does not read it.
            /// assert_eq!(process.close().unwrap_err().kind(), ErrorKind::TimedOut);
            /// let mut late = String::new();
            /// (&host).read_to_string(&mut late)?;
            /// assert_eq!(late, "read me");
            /// # Ok::<(), Box<dyn std::error::Error>>(())
            /// ```
            ///
            /// # Errors
            /// Only with [`set_linger`](Self::set_linger): `TimedOut` when the peer has not
            /// consumed everything in time, `ConnectionReset` when it has reset the connection and
            /// may not have consumed everything.
            pub fn close(self) -> io::Result<()> {
                self.conn.close()
            }

            /// The number of the connection's queue pair
            /// ([`EndpointBuilder::queue_pairs`](crate::vsock::EndpointBuilder::queue_pairs)).
            pub fn queue_pair(&self) -> u16 {
                self.conn.queue_pair()
            }

            /// Bytes sent and not yet reported as consumed (SIOCOUTQ). Peers report only now and
            /// then, so this call requests a report: call again to see it. As with
            /// [`set_linger`](Self::set_linger), a device between two processes consumes what it
            /// forwards.
            pub fn unsent(&self) -> usize {
                self.conn.unsent()
            }
        }

        impl fmt::Debug for $socket {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($socket))
                    .field("local", &self.conn.local)
                    .field("peer", &self.conn.peer)
                    .finish_non_exhaustive()
            }
        }
    };
}
pub(in crate::vsock) use connection_calls;
