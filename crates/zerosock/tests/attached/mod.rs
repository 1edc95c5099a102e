//! Processes that attach to a program that embeds the device: names, zero copy, and cleanup.
//!
//! The place of a byte is compared by file and offset of the mapping that a pointer is in: pointers
//! of two processes to one byte differ, these do not.

mod agent;
mod copies;
mod dying;
mod giving_back;
mod holding;
mod hub;
mod in_guest;
mod outliving;
mod pages;
mod refused;
mod sharing;
mod taken_back;
mod trust;

use std::time::Duration;

use zerosock::Port;
use zerosock::vsock::Stream;

use crate::common;

const PORT: Port = Port::new(5000);

/// A hold time longer than any test: leased bytes stay in place.
const FOR_EVER: Duration = Duration::from_secs(600);

/// Sets time-outs of `PATIENCE`.
fn patient(stream: Stream) -> Stream {
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    stream.set_write_timeout(Some(common::PATIENCE)).unwrap();
    stream
}
