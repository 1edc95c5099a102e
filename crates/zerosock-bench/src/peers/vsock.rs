//! A program in a guest: it connects to the host by its kernel's AF_VSOCK, and sends or receives.
//!
//! This is no contestant but the other side of the table `rx` with `--vm`. It sleeps and copies, as
//! any program on a stock kernel.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use zerosock_sys::vsock;

use crate::peers::bytes::Bytes;
use crate::peers::dequeue::{self, Dequeue, Dequeued};
use crate::worker::jobs;
use crate::worker::order::{Job, Order, Outcome};
use crate::worker::touch::{Check, Fault};

/// Name in an order.
pub(crate) const NAME: &str = "vsock";

/// CID 2, the host.
const HOST: u32 = 2;
/// Longer than the kernel's own 2 s, so that the error comes from the kernel.
const CONNECT: Duration = Duration::from_secs(10);

/// Connects to the port of the host that the order names, and carries out the order.
pub(crate) fn run(order: &Order) -> Result<Outcome, Fault> {
    let port = order.destination()?;
    let port = port
        .parse()
        .map_err(|_| format!("to={port}: no port of the host"))?;
    let socket =
        vsock::connect_blocking(HOST, port, CONNECT).map_err(|error| text("connect", error))?;
    vsock::set_buffer_size(&socket, super::ours::WINDOW.into())
        .map_err(|error| text("buffer size", error))?;
    if order.job == Job::Receive {
        let mut receiver = Kernel {
            buffer: vec![0; order.size],
            socket,
        };
        return dequeue::run_with(&mut receiver, order);
    }
    // Only read and write are used, which all stream sockets share.
    let output = UnixStream::from(socket);
    let input = output
        .try_clone()
        .map_err(|error| text("duplicate", error))?;
    jobs::run(&mut Bytes::new(input, output, order.size), order)
}

/// A kernel socket, read by copying.
struct Kernel {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

impl Dequeue for Kernel {
    fn wait(&mut self, len: usize) -> Result<(), Fault> {
        let low_water = u32::try_from(len).map_err(|_| "too large a message")?;
        vsock::set_receive_low_water(&self.socket, low_water)
            .map_err(|error| text("SO_RCVLOWAT", error))?;
        loop {
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], None) {
                Err(rustix::io::Errno::INTR) => {}
                result => return result.map(drop).map_err(|error| text("poll", error.into())),
            }
        }
    }

    fn dequeue(&mut self, number: u64, len: usize) -> Result<Dequeued, Fault> {
        let mut filled = 0;
        while filled < len {
            match rustix::io::read(&self.socket, &mut self.buffer[filled..len]) {
                Ok(0) => return Err("the host is gone".to_owned()),
                Ok(got) => filled += got,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(text("read", error.into())),
            }
        }
        Dequeued::after(|| {
            let mut check = Check::new(number, len);
            check.part(&self.buffer[..len]);
            check.finish()
        })
    }
}

fn text(what: &str, error: io::Error) -> Fault {
    format!("{what}: {error}")
}
