//! Zero-copy sockets between virtual machines, hosts and processes.
//!
//! [`vsock`] has the sockets. A program is the host itself ([`vsock::Host`]), or attaches to one as
//! a process ([`vsock::Endpoint`]). It reads received bytes where the peer wrote them, and writes
//! sent bytes where the peer reads them:
//!
//! ```
//! use std::io::Write;
//! use std::thread;
//!
//! use zerosock::vsock::{Endpoint, Host};
//! use zerosock::{Address, Cid, Port};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("attach.sock");
//! let host = Host::builder().attach(&path).start()?;
//! let listener = host.listen(Port::new(1024), 16)?;
//! thread::spawn(move || -> std::io::Result<()> {
//!     let (stream, _process) = listener.accept()?;
//!     while let Some(question) = stream.recv()? {
//!         let mut answer = stream.loan(question.len())?;
//!         answer.write_all(&question.to_vec().to_ascii_uppercase())?;
//!         answer.send()?;
//!     }
//! #   loop { host.drive()?; thread::yield_now(); }
//! #   #[allow(unreachable_code)]
//!     Ok(())
//! });
//!
//! let endpoint = Endpoint::builder().name("web").attach(&path)?;
//! let mut stream = endpoint.connect(Address::new(Cid::HOST, Port::new(1024)))?;
//! stream.write_all(b"hello")?;
//! let answer = stream.recv()?.expect("an answer");
//! assert_eq!(answer.to_vec(), b"HELLO");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`daemon`] is what `zerosock serve` runs: a vhost-user device that moves payload between guest
//! memory and host sockets without a buffer in between. [`attach`] is the protocol by which processes
//! attach, [`driver`] the driver half of an endpoint. [`zc`] (the crate `zerosock-zc`) sends over
//! kernel sockets without a copy, and [`net`] (the crate `zerosock-net`) has network devices and the
//! [driver](net::interface) of one. ARCHITECTURE.md describes the modules and the data path.
#![forbid(unsafe_code)]

mod control;
pub mod daemon;
pub mod device;
pub mod driver;
mod fallible;
mod fault;
mod header;
mod host;
#[cfg(test)]
mod lingering;
mod routing;
mod stats;
mod table;
pub mod vsock;

pub use control::attach;
pub use routing::{access, forward};
pub use zerosock_net as net;
pub use zerosock_proto::{Address, Cid, Port};
pub use zerosock_zc as zc;
