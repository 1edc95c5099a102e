//! `zerosock perf`: `vsock_rx_perf` of the kernel patch set "virtio/vsock: experimental zerocopy
//! receive", in user space.
//!
//! "It works in client/server mode. When client connects to server, server starts sending specified
//! amount of data to client. Client reads data and waits for next portion of it." What is measured
//! The time in the dequeue calls is measured; so nothing else happens between two readings of the
//! clock, and the bytes are processed ([`bytes`]) outside of it.

pub(crate) mod args;
mod bytes;
mod endpoint;
mod kernel;
mod receive;
mod report;
mod send;
mod settings;

use self::args::PerfArgs;
use self::settings::{EndpointKind, Role, Settings};
use crate::failure::Failure;

/// Runs one side.
pub(crate) fn main(args: PerfArgs) -> Result<(), Failure> {
    let Settings {
        endpoint,
        role,
        buffer,
        output,
    } = Settings::new(args)?;
    match (&role, &endpoint) {
        (Role::Server(server), EndpointKind::Kernel) => kernel::serve(server, buffer, output),
        (Role::Server(server), _) => endpoint::serve(&endpoint, server, buffer, output),
        (Role::Client(client), EndpointKind::Kernel) => kernel::dequeue(client, buffer, output),
        (Role::Client(client), _) => endpoint::dequeue(&endpoint, client, buffer, output),
    }
    .map_err(Failure::runtime)
}
