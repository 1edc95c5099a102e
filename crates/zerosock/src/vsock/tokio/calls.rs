//! The calls that async sockets have in common, generated for each type. Each type has the fields
//! `socket` and `watch`.

/// Async calls that wait until the socket's call of the same name does not block.
macro_rules! awaited {
    ($socket:ident: $(
        $name:ident $(<$param:ident: $bound:path>)? ($($arg:ident: $type:ty),*) -> $result:ty;
    )*) => {$(
        #[doc = concat!("As [`", stringify!($socket), "::", stringify!($name), "`].")]
        ///
        /// # Errors
        /// As there.
        pub async fn $name $(<$param: $bound>)? (&self, $($arg: $type),*) -> io::Result<$result> {
            self.watch.when(|| self.socket.$name($($arg),*)).await
        }
    )*};
}
pub(super) use awaited;

/// What all async sockets have.
macro_rules! async_socket {
    ($async:ident, $socket:ident) => {
        impl $async {
            /// The local address.
            pub fn local_addr(&self) -> Address {
                self.socket.local_addr()
            }

            /// The socket itself: its options and its state. Its calls do not block.
            pub fn get_ref(&self) -> &$socket {
                &self.socket
            }

            /// The socket, taken out of the runtime; its calls block again.
            pub fn into_inner(self) -> $socket {
                // Cannot fail.
                let _ = self.socket.set_nonblocking(false);
                self.socket
            }
        }
    };
}
pub(super) use async_socket;

/// What all async connections have. `$connect` is the blocking call that connects.
macro_rules! async_connection {
    ($async:ident, $socket:ident, $connect:ident) => {
        async_socket!($async, $socket);

        impl $async {
            /// Takes a connection into the runtime of the caller.
            ///
            /// # Errors
            /// When the system has no descriptor left.
            ///
            /// # Panics
            /// Outside of a tokio runtime, as everything of tokio's does, or in one without its I/O
            /// driver (`enable_io`). Its time driver is not needed.
            pub fn new(socket: $socket) -> io::Result<$async> {
                let watch = Watched::new(&socket.conn.core, Interest::Conn(socket.conn.id))?;
                socket.conn.waits.blocking.set_async();
                Ok($async { socket, watch })
            }

            /// Connects to `peer`. Dropping the future cancels the connect.
            ///
            /// # Errors
            #[doc = concat!("As [`Endpoint::", stringify!($connect), "`](crate::vsock::Endpoint::", stringify!($connect), ").")]
            ///
            /// # Panics
            /// Outside of a tokio runtime.
            pub async fn connect(
                from: impl Into<EndpointRef<'_>>,
                peer: Address,
            ) -> io::Result<$async> {
                let connection = $async::new(from.into().begin_connect(peer)?)?;
                let socket = &connection.socket;
                connection.watch.when(|| socket.wait_connected()).await?;
                Ok(connection)
            }

            /// Connects to `port` of the attached process called `name`.
            ///
            /// # Errors
            /// `NotFound` when no attached process has the name, `InvalidInput` for an invalid name;
            /// else as [`connect`](Self::connect).
            ///
            /// # Panics
            /// Outside of a tokio runtime.
            pub async fn connect_name(
                from: impl Into<EndpointRef<'_>>,
                name: &str,
                port: Port,
            ) -> io::Result<$async> {
                let from = from.into();
                let resolver = from.resolver(name);
                let cid = spawn_blocking(resolver).await.map_err(io::Error::other)??;
                $async::connect(from, Address::new(cid, port)).await
            }

            /// The peer's address.
            pub fn peer_addr(&self) -> Address {
                self.socket.peer_addr()
            }
        }
    };
}
pub(super) use async_connection;

/// What all async listeners have. `$async` is the type of their connections.
macro_rules! async_listener {
    ($async_listener:ident, $listener:ident, $async:ident) => {
        impl $async_listener {
            /// Takes a listener into the runtime of the caller.
            ///
            /// # Errors
            /// When the system has no descriptor left.
            ///
            /// # Panics
            /// Outside of a tokio runtime.
            pub fn new(socket: $listener) -> io::Result<$async_listener> {
                let interest = Interest::Port(socket.local_addr().port);
                let watch = Watched::new(&socket.port().core, interest)?;
                socket.port().waits.blocking.set_async();
                Ok($async_listener { socket, watch })
            }

            /// The address that is listened on.
            pub fn local_addr(&self) -> Address {
                self.socket.local_addr()
            }

            /// Accepts the oldest pending connection; returns it and the address of its peer.
            ///
            /// # Errors
            #[doc = concat!("As [`", stringify!($listener), "::accept`].")]
            pub async fn accept(&self) -> io::Result<($async, Address)> {
                let (connection, peer) = self.watch.when(|| self.socket.accept()).await?;
                Ok(($async::new(connection)?, peer))
            }

            fn poll_accept(&self, cx: &Context<'_>) -> Poll<Option<io::Result<$async>>> {
                let watch = &self.watch;
                let accepted = ready!(watch.poll(&watch.reader, cx, || self.socket.accept()));
                Poll::Ready(Some(accepted.and_then(|(socket, _)| $async::new(socket))))
            }
        }
    };
}
pub(super) use async_listener;
