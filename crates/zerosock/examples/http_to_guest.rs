//! A web server for a guest, without the host's network stack: a program on a port of a switch, with the
//! TCP/IP stack smoltcp on `zerosock::net`.
//!
//! ```sh
//! zerosock net --socket /tmp/guest.net --socket /tmp/program.net
//! cargo run --example http_to_guest --features smoltcp -- /tmp/program.net 10.77.0.1
//! guest$ ip addr add 10.77.0.2/24 dev eth0; ip link set eth0 up; wget -O - http://10.77.0.1/
//! ```
//!
//! Without arguments it starts a switch, and a second stack takes the place of the guest.

use std::net::Ipv4Addr;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use smoltcp::iface::{Config, Interface as Stack, SocketHandle, SocketSet};
use smoltcp::socket::tcp;
use smoltcp::time;
use smoltcp::wire::{EthernetAddress, IpCidr};
use zerosock::net::interface::{Interface, InterfaceConfig, InterfaceStats, SmoltcpDevice};
use zerosock::net::server::{GuestConfig, Limits, Server};
use zerosock::net::tap::TapBackend;

type Error = Box<dyn std::error::Error + Send + Sync>;

const PORT: u16 = 80;
/// Connections at a time.
const CLIENTS: usize = 8;
/// Bytes of the buffers of a connection, each way.
const BUFFER: usize = 64 << 10;
/// Bytes of the head of a request at most.
const HEAD: usize = 32 << 10;
const PAGE: &[u8] = b"Hello from a program that has no socket.\n";

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args[..] {
        [path, address] => {
            let host = Host::connect(path.as_ref(), address.parse()?)?;
            serve(host, PAGE, &AtomicBool::new(false)).map(drop)
        }
        [] => demonstrate(),
        _ => Err("usage: http_to_guest [SOCKET IPV4-ADDRESS]".into()),
    }
}

/// A TCP/IP stack on a port of a switch.
pub(crate) struct Host {
    device: SmoltcpDevice,
    stack: Stack,
    sockets: SocketSet<'static>,
    began: Instant,
}

impl Host {
    /// Attaches to the port at `path`, with an address in a network of 24 bits.
    pub(crate) fn connect(path: &Path, address: Ipv4Addr) -> Result<Host, Error> {
        let interface = Interface::connect(path, &InterfaceConfig::default())?;
        let mac = EthernetAddress(interface.mac().0);
        let mut device = SmoltcpDevice::new(interface);
        let mut stack = Stack::new(Config::new(mac.into()), &mut device, time::Instant::ZERO);
        stack.update_ip_addrs(|addresses| {
            // There is room for one.
            let _ = addresses.push(IpCidr::new(address.into(), 24));
        });
        Ok(Host {
            device,
            stack,
            sockets: SocketSet::new(Vec::new()),
            began: Instant::now(),
        })
    }

    fn add_socket(&mut self) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; BUFFER]);
        self.sockets.add(tcp::Socket::new(buffer(), buffer()))
    }

    fn now(&self) -> time::Instant {
        time::Instant::from_micros(self.began.elapsed().as_micros() as i64)
    }

    /// Lets the stack receive and send what it can.
    fn turn(&mut self) {
        let now = self.now();
        self.stack.poll(now, &mut self.device, &mut self.sockets);
    }

    /// Waits for a frame, or until the stack has to do something, or for `most`.
    fn wait(&mut self, most: Duration) -> Result<(), Error> {
        let now = self.now();
        let delay = self.stack.poll_delay(now, &self.sockets);
        let most = most.into();
        self.device
            .wait(Some(delay.map_or(most, |delay| delay.min(most))))?;
        Ok(())
    }
}

/// A connection.
struct Client {
    socket: SocketHandle,
    /// The request as far as it has come.
    request: Vec<u8>,
    /// The answer, and how much of it was sent.
    answer: Vec<u8>,
    sent: usize,
}

/// Answers every request for `/` with the page, until `end`. Returns the counters of the interface.
pub(crate) fn serve(
    mut host: Host,
    page: &[u8],
    end: &AtomicBool,
) -> Result<InterfaceStats, Error> {
    let mut clients: Vec<_> = (0..CLIENTS)
        .map(|_| Client {
            socket: host.add_socket(),
            request: Vec::new(),
            answer: Vec::new(),
            sent: 0,
        })
        .collect();
    while !end.load(Ordering::Relaxed) {
        host.turn();
        for client in &mut clients {
            client.turn(host.sockets.get_mut(client.socket), page)?;
        }
        // What was just answered is sent without a pause.
        host.turn();
        host.wait(Duration::from_millis(100))?;
    }
    Ok(host.device.interface().stats())
}

impl Client {
    fn turn(&mut self, socket: &mut tcp::Socket<'_>, page: &[u8]) -> Result<(), Error> {
        if !socket.is_open() {
            self.request.clear();
            self.answer.clear();
            self.sent = 0;
            socket.listen(PORT)?;
        }
        if self.answer.is_empty() && socket.can_recv() {
            // The head of a request is copied; an answer would be read where it lies.
            socket.recv(|bytes| {
                self.request.extend_from_slice(bytes);
                (bytes.len(), ())
            })?;
            self.answer = match answer(&self.request, page) {
                Some(answer) => answer,
                None if self.request.len() < HEAD && socket.may_recv() => return Ok(()),
                None => {
                    socket.abort();
                    return Ok(());
                }
            };
        }
        if self.sent < self.answer.len() && socket.can_send() {
            self.sent += socket.send_slice(&self.answer[self.sent..])?;
        }
        let is_answered = !self.answer.is_empty() && self.sent == self.answer.len();
        let asks_nothing = self.answer.is_empty() && socket.state() == tcp::State::CloseWait;
        if is_answered || asks_nothing {
            socket.close();
        }
        Ok(())
    }
}

/// The answer to a request; `None` if its head is not complete.
fn answer(request: &[u8], page: &[u8]) -> Option<Vec<u8>> {
    request.windows(4).find(|end| end == b"\r\n\r\n")?;
    let (status, body) = match request.starts_with(b"GET / ") {
        true => ("200 OK", page),
        false => ("404 Not Found", &b"Only / is here.\n"[..]),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    Some([head.as_bytes(), body].concat())
}

/// A switch with the server on one port, and a client in the place of a guest on the other.
fn demonstrate() -> Result<(), Error> {
    let dir = tempfile::tempdir()?;
    let (guest, program) = (dir.path().join("guest.net"), dir.path().join("program.net"));
    let port = |path: &Path, mac: &str| -> Result<GuestConfig, Error> {
        Ok(GuestConfig {
            name: path.display().to_string(),
            listener: UnixListener::bind(path)?,
            mac: Some(mac.parse()?),
            mac_filter: true,
            mtu: None,
            sealed_memory: true,
            limits: Limits {
                descriptors: 256,
                numbers: 512,
                mapped: 1 << 30,
                mapped_each: 1 << 30,
            },
        })
    };
    let ports = vec![
        port(&guest, "52:54:00:00:00:01")?,
        port(&program, "52:54:00:00:00:02")?,
    ];
    let switch = Server::start_switch(ports, None::<(String, TapBackend)>, Duration::ZERO)?;

    let host = Host::connect(&program, Ipv4Addr::new(10, 77, 0, 1))?;
    let end = AtomicBool::new(false);
    let text = thread::scope(|scope| {
        let server = scope.spawn(|| serve(host, PAGE, &end));
        let text = get(&guest);
        end.store(true, Ordering::Relaxed);
        let stats = server.join().expect("the server does not panic")?;
        println!("{stats:?}");
        text
    })?;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(text.as_bytes().ends_with(PAGE), "{text}");
    println!("{text}");
    switch.shutdown();
    Ok(())
}

/// Fetches the page.
fn get(path: &Path) -> Result<String, Error> {
    let mut guest = Host::connect(path, Ipv4Addr::new(10, 77, 0, 2))?;
    let handle = guest.add_socket();
    let server = (Ipv4Addr::new(10, 77, 0, 1), PORT);
    let socket = guest.sockets.get_mut::<tcp::Socket<'_>>(handle);
    socket.connect(guest.stack.context(), server, 49152)?;
    let mut text = Vec::new();
    let mut asked = false;
    loop {
        guest.turn();
        let socket = guest.sockets.get_mut::<tcp::Socket<'_>>(handle);
        if !asked && socket.can_send() {
            socket.send_slice(b"GET / HTTP/1.1\r\nHost: 10.77.0.1\r\n\r\n")?;
            asked = true;
        }
        while socket.can_recv() {
            socket.recv(|bytes| {
                text.extend_from_slice(bytes);
                (bytes.len(), ())
            })?;
        }
        if asked && !socket.may_recv() {
            return Ok(String::from_utf8(text)?);
        }
        guest.wait(Duration::from_millis(100))?;
    }
}
