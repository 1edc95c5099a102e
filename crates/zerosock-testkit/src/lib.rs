//! What the tests with guests and the benchmarks share.
//!
//! `zerosock_cli::vm` boots a guest with a program in it. Here that program is [`guest`], an agent
//! that does as the host says: [`remote`] speaks to it over the guest's second serial port with the
//! lines of [`protocol`], not over vsock, so that a device that fails can still be reported on. [`uml`]
//! boots user-mode Linux as `zerosock_cli::vm::qemu` boots QEMU, and [`device`] runs a device as a
//! process. [`packages`] adds programs of the system to a guest, and
//! [`datagrams`] checks what has arrived of some. [`entropy`] is a device of another kind than vsock.
//!
//! A program that tests with guests is the agent itself, under its own name, when its first argument
//! is [`guest::NAME`]; `zerosock-testkit` is that and the whole `zerosock` command besides, so that
//! one program in the guest is enough. [`soak`] is a long run without guests.
#![deny(unsafe_code)]

pub mod calls;
pub mod datagrams;
pub mod device;
#[path = "../../zerosock/tests/common/driver.rs"]
pub mod driver;
pub mod entropy;
pub mod guest;
pub mod packages;
pub mod protocol;
pub mod remote;
pub mod soak;
pub mod uml;
