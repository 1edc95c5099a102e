//! Zero-copy sockets between virtual machines, hosts and processes.
//!
//! [`vsock`] has the sockets: a program is the host itself ([`vsock::Host`]), or attaches to one as
//! a process ([`vsock::Endpoint`]). What is received is read where it lies, and what is sent is
//! written where it will be read:
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
//! #   loop { host.turn()?; thread::yield_now(); }
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
//! [`daemon`] is what `zerosock serve` runs: a vhost-user device whose payload goes between guest
//! memory and host sockets without a buffer of ours. [`attach`] is the protocol by which processes
//! join, [`driver`] the driver half beneath an endpoint. [`zc`] (the crate `zerosock-zc`) sends over
//! kernel sockets without a copy. The rooms and the way of a byte through them are in ARCHITECTURE.md.
#![forbid(unsafe_code)]

mod control;
pub mod daemon;
pub mod device;
pub mod driver;
mod fallible;
mod fault;
mod header;
mod host;
mod io;
#[cfg(test)]
mod lingering;
mod routing;
mod stats;
mod table;
pub mod vsock;
mod worker;

pub use control::attach;
pub use routing::access;
pub use zerosock_proto::{Address, Cid, Port};
pub use zerosock_zc as zc;
