//! `zerosock perf`: `vsock_rx_perf` of the kernel patch set "virtio/vsock: experimental zerocopy
//! receive", in user space.
//!
//! "It works in client/server mode. When client connects to server, server starts sending specified
//! amount of data to client. Client reads data and waits for next portion of it." What is measured
//! The time in the dequeue calls is measured; so nothing else happens between two readings of the
//! clock, and the bytes are processed ([`bytes`]) outside of it.

pub(crate) mod args;
mod bytes;
mod kernel;
mod place;
mod receive;
mod report;
mod send;
mod settings;

use self::args::PerfArgs;
use self::settings::{Place, Role, Settings};
use crate::failure::Failure;

/// Runs one side.
pub(crate) fn main(args: PerfArgs) -> Result<(), Failure> {
    let Settings {
        place,
        role,
        buffer,
    } = Settings::new(args)?;
    match (&role, &place) {
        (Role::Server(server), Place::Kernel) => kernel::serve(server, buffer),
        (Role::Server(server), _) => place::serve(&place, server, buffer),
        (Role::Client(client), Place::Kernel) => kernel::dequeue(client, buffer),
        (Role::Client(client), _) => place::dequeue(&place, client, buffer),
    }
    .map_err(Failure::runtime)
}
