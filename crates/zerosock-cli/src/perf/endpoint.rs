//! Endpoints: an attached process, or a host that embeds the device.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use zerosock::vsock::rxmap::PAGE;
use zerosock::vsock::{Endpoint, EndpointBuilder, EndpointStats, Host, Listener, Stream};
use zerosock::{Address, Cid, Port};

use super::bytes::ByteChecker;
use super::settings::{Client, EndpointKind, Mode, Output, Server};
use super::{receive, report, send};

/// The largest packet of vsock.
const PACKET: usize = 64 << 10;
/// A connection may lease in place one of this number of buffers.
const SHARE: usize = 8;
/// Default of `zerosock serve`.
const QUEUES: usize = 1024;
/// Bytes in flight that the server supports, if the client does.
const SENDER: u32 = 2 << 30;
/// How long the host waits for its peer: a guest has to boot.
const GUEST: Duration = Duration::from_secs(120);

/// An open endpoint, which makes the sockets.
enum Open {
    Endpoint(Endpoint),
    Host(Host),
}

impl Open {
    /// `builder` configures an attached process, `window` a host.
    fn new(endpoint: &EndpointKind, builder: EndpointBuilder, window: u32) -> io::Result<Open> {
        match endpoint {
            EndpointKind::Attach(path) => {
                let endpoint = builder.attach(path).map_err(io::Error::other)?;
                Ok(Open::Endpoint(endpoint))
            }
            EndpointKind::Device(path) => {
                let endpoint = builder.attach_device(path).map_err(io::Error::other)?;
                Ok(Open::Endpoint(endpoint))
            }
            EndpointKind::Host { vm, attach } => {
                let mut builder = Host::builder().window(window);
                if let Some((cid, path)) = vm {
                    // Any VMM: a guest that breaks the measurement only ends it.
                    builder = builder.vm(*cid, path).allow_unsealed_memory();
                }
                if let Some(path) = attach {
                    builder = builder.attach(path);
                }
                Ok(Open::Host(builder.start().map_err(io::Error::other)?))
            }
            EndpointKind::Kernel => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn cid(&self) -> Cid {
        match self {
            Open::Endpoint(endpoint) => endpoint.cid(),
            Open::Host(_) => Cid::HOST,
        }
    }

    fn listen(&self, port: Port) -> io::Result<Listener> {
        match self {
            Open::Endpoint(endpoint) => endpoint.listen(port, 1),
            Open::Host(host) => host.listen(port, 1),
        }
    }

    /// The host repeats connects: its peer cannot attach before the host has made the socket.
    fn connect(&self, peer: Address) -> io::Result<Stream> {
        let host = match self {
            Open::Endpoint(endpoint) => return endpoint.connect(peer),
            Open::Host(host) => host,
        };
        let give_up = Instant::now() + GUEST;
        let mut said = String::new();
        loop {
            match host.connect(peer) {
                Err(error) if Instant::now() < give_up => {
                    let why = error.to_string();
                    if why != said {
                        eprintln!("zerosock: {peer}: {why}; trying again");
                        said = why;
                    }
                    host.drive()?;
                    thread::sleep(Duration::from_millis(5));
                }
                result => return result,
            }
        }
    }

    fn set_rx_map(&self, enabled: bool) {
        match self {
            Open::Endpoint(endpoint) => endpoint.set_rx_map(enabled),
            Open::Host(host) => host.set_rx_map(enabled),
        }
    }

    fn stats(&self) -> EndpointStats {
        match self {
            Open::Endpoint(endpoint) => endpoint.stats(),
            Open::Host(host) => host.stats(),
        }
    }

    /// A host continues until an attached process has detached, which the device answers.
    fn linger(&self) -> io::Result<()> {
        let Open::Host(host) = self else {
            return Ok(());
        };
        let until = Instant::now() + Duration::from_millis(200);
        while Instant::now() < until {
            host.drive()?;
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

pub(super) fn serve(
    endpoint: &EndpointKind,
    server: &Server,
    buffer: usize,
    output: Output,
) -> io::Result<()> {
    // A sender has no more in flight than its own window.
    let open = Open::new(endpoint, Endpoint::builder().window(SENDER), SENDER)?;
    let listener = open.listen(server.port)?;
    let cid = open.cid().get();
    output.begin(&report::server_begins(server, buffer, cid));
    let (mut stream, _) = listener.accept()?;
    let took = send::run(server.bytes, buffer, |bytes| stream.write(bytes))?;
    report::server(server.bytes, took).print(output);
    stream.shutdown(Shutdown::Write)?;
    // Bytes in flight are lost when this process ends: wait until the peer closes.
    while stream.read(&mut [0; 16]).is_ok_and(|got| got > 0) {}
    open.linger()
}

pub(super) fn dequeue(
    endpoint: &EndpointKind,
    client: &Client,
    buffer: usize,
    output: Output,
) -> io::Result<()> {
    let (packet, entries) = queues(buffer);
    let builder = Endpoint::builder()
        .window(client.credit)
        .receive_buffers(packet as u32)
        .queue_size(entries as u16);
    let open = Open::new(endpoint, builder, client.credit)?;
    open.set_rx_map(client.mode != Mode::Copy);
    output.begin(&report::client_begins(client, buffer));
    let failed = |error| report::not_connected(client.peer, &error);
    let stream = open.connect(client.peer).map_err(failed)?;
    let mut checker = ByteChecker::new(client.check_mode);
    let counted = receive::on_stream(&stream, client, buffer, &mut checker);
    let counted = counted.map_err(|error| report::interrupted(error, open.stats()))?;
    report::client(client.mode, &counted, Some(open.stats())).print(output);
    drop(stream);
    open.linger()
}

/// Size of a receive buffer and number of queue entries, two for each buffer: a dequeue returns
/// whole packets, and those of one dequeue must fit the connection's share of the buffers.
fn queues(buffer: usize) -> (usize, usize) {
    let packet = buffer.clamp(PAGE, PACKET);
    let entries = 2 * SHARE * buffer.div_ceil(packet);
    let entries = entries.next_power_of_two().clamp(256, QUEUES);
    (packet, entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dequeue_is_within_the_connections_share() {
        for pages in [1, 4, 16, 32, 64, 128, 1024] {
            let buffer = pages * PAGE;
            let (packet, entries) = queues(buffer);
            assert!(packet * (entries / 2 / SHARE) >= buffer, "{pages}");
        }
        assert_eq!(queues(4096), (4096, 256));
        assert_eq!(queues(512 << 10), (65536, 256));
        assert_eq!(queues(1 << 30), (65536, 1024));
    }
}
