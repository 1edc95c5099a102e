//! Zero-copy sockets between virtual machines, hosts and processes.
//!
//! A program opens one of two kinds of endpoints:
//!
//! - a [`Host`](vsock::Host) contains the vsock device. It is CID 2 to VMs, which connect by vhost-user, and to
//!   processes, which attach at a Unix socket;
//! - an [`Endpoint`](vsock::Endpoint) attaches to a `Host` in another process, or to `zerosock serve`, and has a CID
//!   of its own, as a guest has.
//!
//! Both have the same sockets, with the calls of `std::net`: [`Stream`](vsock::Stream),
//! [`Listener`](vsock::Listener), [`SeqPacket`](vsock::SeqPacket) for messages, [`Datagram`](vsock::Datagram).
//! Received bytes can also be read where the peer wrote them ([`Lease`](vsock::Lease)), and sent bytes be written
//! where the peer reads them ([`Loan`](vsock::Loan)).
//!
//! # A program that serves
//!
//! ```no_run
//! use std::io::Write;
//! use std::thread;
//!
//! use zerosock::vsock::{Host, Stream};
//! use zerosock::{Cid, Port};
//!
//! type Error = Box<dyn std::error::Error + Send + Sync>;
//!
//! fn main() -> Result<(), Error> {
//!     let host = Host::builder()
//!         .vm(Cid::new(3), "/tmp/vm3.sock") // the vhost-user socket of a VM
//!         .attach("/tmp/attach.sock") // processes attach here
//!         .background() // a thread moves packets while the program does other work
//!         .start()?;
//!     let listener = host.listen(Port::new(1024), 16)?;
//!     for stream in listener.incoming() {
//!         let stream = stream?;
//!         thread::spawn(move || {
//!             let peer = stream.peer_addr();
//!             if let Err(error) = echo(stream) {
//!                 eprintln!("{peer}: {error}");
//!             }
//!         });
//!     }
//!     Ok(())
//! }
//!
//! fn echo(stream: Stream) -> Result<(), Error> {
//!     // A lease is a packet where the peer wrote it; `None` is the end of the stream.
//!     while let Some(lease) = stream.recv()? {
//!         let answer = lease.to_vec().to_ascii_uppercase();
//!         (&stream).write_all(&answer)?;
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # A program that connects
//!
//! ```no_run
//! use std::io::{Read, Write};
//! use std::net::Shutdown;
//!
//! use zerosock::vsock::Endpoint;
//! use zerosock::{Address, Cid, Port};
//!
//! type Error = Box<dyn std::error::Error + Send + Sync>;
//!
//! fn main() -> Result<(), Error> {
//!     let endpoint = Endpoint::builder().name("web").attach("/tmp/attach.sock")?;
//!     let mut stream = endpoint.connect(Address::new(Cid::HOST, Port::new(1024)))?;
//!     stream.write_all(b"hello")?;
//!     stream.shutdown(Shutdown::Write)?;
//!     let mut answer = String::new();
//!     stream.read_to_string(&mut answer)?;
//!     println!("{answer}");
//!     Ok(())
//! }
//! ```
//!
//! A write waits while the peer has a window of bytes unread (256 KiB by default). So a program that sends more to a
//! server that answers as it reads has to read at the same time: in another thread, through `&stream`, or by
//! non-blocking calls.
//!
//! # What drives an endpoint
//!
//! A thread of the library, if a program asks for it with `background`
//! ([`HostBuilder`](vsock::HostBuilder::background), [`EndpointBuilder`](vsock::EndpointBuilder::background)): simple,
//! and at the cost of one more thread that wakes for each packet. Otherwise the calls of a program do: each call on a socket (`accept`, `recv`,
//! `read`, `write`, `connect`) first drives its endpoint, and a call that waits drives all sockets of the endpoint
//! until it returns. Any number of threads may call at the same time; one of them drives. While no call is under
//! way, peers wait: no process can attach, nothing is accepted, acknowledged or received, and bytes written last may not
//! have reached the peer yet. So a program without `background`
//!
//! - keeps a thread in a call that waits, such as a loop over [`incoming`](vsock::Listener::incoming); or
//! - calls [`Host::drive`](vsock::Host::drive) or [`Endpoint::drive`](vsock::Endpoint::drive) regularly while it
//!   does other work; or
//! - waits for events, and calls its sockets when there are some, as described next.
//!
//! # Event loops
//!
//! The descriptor to poll is the endpoint's, not the stream's: all sockets of an endpoint have the same one
//! ([`AsFd`](std::os::fd::AsFd) of a stream returns it too). It says that some socket of the endpoint may be ready,
//! and a [`Poller`](vsock::Poller) says which. So a program has three choices:
//!
//! - [`Poller::wait`](vsock::Poller::wait) waits by itself, for sockets of any number of endpoints, and for other
//!   descriptors ([`Poller::add_fd`](vsock::Poller::add_fd));
//! - an event loop of another kind (mio, epoll) registers the endpoint's descriptor, and calls
//!   [`Poller::poll`](vsock::Poller::poll) when it is readable:
//!
//! ```
//! # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
//! # use zerosock::Address;
//! use rustix::event::{PollFd, PollFlags};
//! use zerosock::Port;
//! use zerosock::vsock::{Poller, Readiness, Ready, Wait};
//!
//! let listener = db.listen(Port::new(1), 16)?;
//! listener.set_nonblocking(true)?;
//! let mut poller = Poller::new(Wait::Sleep);
//! poller.add_listener(&listener, 0);
//! let mut streams = Vec::new();
//! // `db` is an `Endpoint`; a `Host` has a descriptor, too. With mio:
//! // registry.register(&mut SourceFd(&db.as_raw_fd()), Token(0), Interest::READABLE)?
//! # let _theirs = web.begin_connect(Address::new(db.cid(), Port::new(1)))?;
//! loop {
//!     // What is ready now, by key. When that is nothing, the descriptor is armed.
//!     let ready = poller.poll()?;
//!     if ready.is_empty() {
//!         // With mio: poll.poll(&mut events, None)?
//!         let mut fds = [PollFd::new(&db, PollFlags::IN)];
//!         rustix::event::poll(&mut fds, None)?;
//!         continue;
//!     }
//!     for Ready { key, .. } in ready {
//!         match key {
//!             0 => {
//!                 let (stream, _peer) = listener.accept()?;
//!                 stream.set_nonblocking(true)?;
//!                 let key = streams.len() as u64 + 1;
//!                 poller.add_stream(&stream, key, Readiness::READABLE);
//!                 streams.push(stream);
//!             }
//!             key => {
//!                 if streams[key as usize - 1].recv()?.is_none() {
//!                     poller.remove(key);
//!                 }
//!             }
//!         }
//!     }
//! #   if !streams.is_empty() { break; }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - with the feature `tokio`, [`vsock::tokio`] has asynchronous sockets; a task of the runtime drives the endpoint,
//!   and listeners are a `Stream` of connections.
//!
//! # Features
//!
//! - `tokio`: the modules [`vsock::tokio`] and `zc::tokio`;
//! - `smoltcp`: a device for the TCP/IP stack smoltcp, in [`net::interface`].
//!
//! # More
//!
//! [`daemon`] is what `zerosock serve` runs, with [`access`], [`attach`] and [`forward`] for its rules. [`zc`] (the
//! crate `zerosock-zc`) sends over kernel sockets without a copy. [`net`] (the crate `zerosock-net`) has network
//! devices and the [driver](net::interface) of one.
//! [ARCHITECTURE.md](https://github.com/zerosock/zerosock/blob/main/ARCHITECTURE.md) describes the modules and the data
//! path.
#![forbid(unsafe_code)]

mod control;
pub mod daemon;
mod device;
#[doc(hidden)]
pub mod driver;
mod fallible;
mod fault;
#[cfg(fuzzing)]
pub mod fuzz;
mod header;
mod host;
#[cfg(test)]
mod lingering;
mod registration;
mod routing;
mod stats;
mod table;
pub mod vsock;

pub use control::attach;
#[doc(hidden)]
pub use control::guest;
pub use routing::{access, forward};
pub use zerosock_net as net;
pub use zerosock_proto::addr::{Address, AddressError, Cid, Port};
pub use zerosock_zc as zc;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
