//! Sockets of the kernel's AF_VSOCK, in a guest.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::retry_on_intr;
use rustix::net::{SendFlags, Shutdown};
use zerosock_sys::{vsock, wait_ready};

use super::bytes::ByteChecker;
use super::settings::{Client, Mode, Output, Server};
use super::{receive, report, send};

/// Longer than the kernel's own 2 s, so that the error comes from the kernel.
const CONNECT: Duration = Duration::from_secs(10);

/// Bytes in flight that the server supports, if the client does.
const SENDER: u64 = 2 << 30;

pub(super) fn serve(server: &Server, buffer: usize, output: Output) -> io::Result<()> {
    let listener = vsock::listen(vsock::CID_ANY, server.port.get(), 1)?;
    let (cid, _) = vsock::local_address(&listener)?;
    output.begin(&report::server_begins(server, buffer, cid));
    let (socket, _, _) = vsock::accept_blocking(&listener)?;
    // Newer kernels also limit bytes in flight by the sender's buffer.
    vsock::set_buffer_size(&socket, SENDER)?;
    let took = send::run(server.bytes, buffer, |bytes| {
        Ok(rustix::net::send(&socket, bytes, SendFlags::NOSIGNAL)?)
    })?;
    report::server(server.bytes, took).print(output);
    rustix::net::shutdown(&socket, Shutdown::Write)?;
    // Closing discards what the peer has not read: wait until the peer closes.
    while read(&socket, &mut [0; 16]).is_ok_and(|got| got > 0) {}
    Ok(())
}

pub(super) fn dequeue(client: &Client, buffer: usize, output: Output) -> io::Result<()> {
    output.begin(&report::client_begins(client, buffer));
    let failed = |error| report::not_connected(client.peer, &error);
    let (cid, port) = (client.peer.cid.get(), client.peer.port.get());
    let socket = vsock::connect_blocking(cid, port, CONNECT).map_err(failed)?;
    vsock::set_buffer_size(&socket, client.credit.into())?;
    vsock::set_receive_low_water(&socket, client.low_water)?;
    let mut checker = ByteChecker::new(client.check_mode);
    let wait = || wait_ready(&socket, PollFlags::IN, None).map(drop);
    let counted = receive::copy(buffer, &mut checker, wait, |out| read(&socket, out))?;
    report::client(Mode::Copy, &counted, None).print(output);
    Ok(())
}

fn read(socket: &OwnedFd, out: &mut [u8]) -> io::Result<usize> {
    Ok(retry_on_intr(|| rustix::io::read(socket, &mut *out))?)
}
