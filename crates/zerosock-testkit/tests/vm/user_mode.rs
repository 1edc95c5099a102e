//! User-mode Linux as the guest: another front-end than QEMU's, Linux's own `virtio_uml`.
//!
//! When its daemon ends, `virtio_uml` takes the device away from the guest for good, as if it
//! had been unplugged: it connects only at boot. What a guest sees that does reconnect
//! (TRANSPORT_RESET, then new connections) is shown with our own driver half, in
//! crates/zerosock/tests/lifecycle.rs.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;

use tempfile::TempDir;
use zerosock_cli::vm::hybrid;
use zerosock_cli::vm::initramfs::Builder;
use zerosock_cli::vm::kernel::Kernel;
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::calls::{Call, Kind, RecvFlags};
use zerosock_testkit::device::{Device, Endpoint};
use zerosock_testkit::protocol::{Command, ShutdownDirection, Socket, Source};
use zerosock_testkit::remote::agent;
use zerosock_testkit::uml::{self, Guest};

use crate::Alone;
use crate::kernels;
use crate::lab::{
    STEP, Skipped, cache, deadlines, device_program, echo, expected, guest_program, port,
    read_exact, short_dir, write, zerosock,
};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("traffic", traffic),
    ("device_killed", device_killed),
    ("forwarding", forwarding),
];

/// What it takes to boot, and to boot again.
struct Bench {
    kernel: Kernel,
    initramfs: PathBuf,
    endpoint: Endpoint,
    _dir: TempDir,
}

impl Bench {
    fn new() -> Result<Bench, Skipped> {
        let kernel = kernels::user_mode()?;
        let dir = short_dir();
        let initramfs = dir.path().join("initramfs");
        let image = Builder::new(&cache(), &kernel, &guest_program(), &agent(uml::TTY), &[])
            .expect("an initramfs")
            .finish();
        std::fs::write(&initramfs, image).expect("the initramfs written");
        Ok(Bench {
            kernel,
            initramfs,
            endpoint: Endpoint::new(dir.path(), 3),
            _dir: dir,
        })
    }

    fn device(&self) -> Device {
        let endpoints = std::slice::from_ref(&self.endpoint);
        Device::start(&device_program(), endpoints, echo("device")).expect("a device")
    }

    /// A device with more flags.
    fn device_with(&self, flags: &[String]) -> Device {
        let mut program = device_program();
        program.arguments.extend(flags.iter().map(Into::into));
        let endpoints = std::slice::from_ref(&self.endpoint);
        Device::start(&program, endpoints, echo("device")).expect("a device")
    }

    fn boot(&self) -> Guest {
        let (image, socket) = (&self.initramfs, &self.endpoint.vhost);
        Guest::boot(
            &self.kernel,
            image,
            &uml::device(socket, uml::VSOCK),
            zerosock(),
            echo("guest"),
        )
        .expect("a guest")
    }

    fn to_host(&self, guest: &Guest) -> (Socket, UnixStream) {
        let port = port();
        let listener = hybrid::listen(&self.endpoint.uds, port).expect("a listener");
        let connecting = guest.remote.start(Command::Connect { cid: 2, port });
        let stream = hybrid::accept(&listener, STEP).expect("the guest's connection");
        deadlines(&stream);
        (connecting.socket(STEP).expect("connected"), stream)
    }

    fn to_guest(&self, guest: &Guest) -> (Socket, UnixStream) {
        let port = port();
        let listen = Command::Listen { port };
        let listener = guest.remote.socket(listen, STEP).expect("a listener");
        let accepting = guest.remote.start(Command::Accept { socket: listener });
        let (stream, _) = hybrid::connect(&self.endpoint.uds, port, STEP).expect("connected");
        deadlines(&stream);
        (accepting.socket(STEP).expect("accepted"), stream)
    }

    /// Both directions on connections made from both ends.
    fn exchange(&self, guest: &Guest, len: u64) {
        for (socket, stream) in [self.to_host(guest), self.to_guest(guest)] {
            let source = Source::Pattern { seed: 1, len };
            let chunks = vec![65536];
            let sending = guest.remote.start(Command::Send {
                socket,
                source,
                chunks,
            });
            assert_eq!(read_exact(&stream, len), expected(1, len));
            assert_eq!(sending.wait(STEP).expect("sent").errno, None);
            let receiving = guest.remote.start(receive(socket, Some(len)));
            let digest = write(&stream, 2, len, &[65536]);
            let received = receiving.wait(STEP).expect("received");
            assert_eq!(received.sha256, Some(digest));
        }
    }
}

fn receive(socket: Socket, limit: Option<u64>) -> Command {
    Command::Receive {
        socket,
        limit,
        keep: false,
        acknowledge: false,
    }
}

fn traffic() -> Result<(), Skipped> {
    let bench = Bench::new()?;
    let mut device = bench.device();
    let guest = bench.boot();
    println!("booted user-mode Linux {}", guest.release);
    bench.exchange(&guest, 16 << 20);
    drop(guest);
    // The next guest on the same socket finds the device as the first one did.
    let guest = bench.boot();
    bench.exchange(&guest, 1 << 20);
    assert!(device.is_running());
    Ok(())
}

/// The daemon is killed: the guest lives on and its connections end at once. A new daemon takes
/// over the sockets that the dead one left behind, and serves the guest's next boot.
fn device_killed() -> Result<(), Skipped> {
    let bench = Bench::new()?;
    let mut device = bench.device();
    let mut guest = bench.boot();
    let (socket, _stream) = bench.to_host(&guest);
    let waiting = guest.remote.start(receive(socket, None));
    device.kill();
    let ended = waiting.wait(STEP).expect("an end, not silence");
    assert!(ended.end || ended.errno.is_some(), "{ended:?}");
    let connect = Command::Connect { cid: 2, port: 1 };
    let gone = guest
        .remote
        .run(connect, STEP)
        .expect("the guest still answers");
    assert!(gone.errno.is_some(), "{gone:?}");
    assert!(guest.is_running());

    let _device = bench.device();
    drop(guest);
    let guest = bench.boot();
    bench.exchange(&guest, 1 << 20);
    Ok(())
}

/// A stock guest through forwarding rules (docs/forward.md): it fetches from a TCP server, serves a TCP
/// client, asks a UDP server, and is refused by a port without a server.
fn forwarding() -> Result<(), Skipped> {
    const QUESTION: u64 = 1000;
    const PAGE: u64 = 8 << 20;
    if std::env::var_os("ZEROSOCK_DEVICE").is_some() {
        return Err(Skipped("another device has no rules".to_owned()));
    }
    let bench = Bench::new()?;
    let web = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let names = UdpSocket::bind("127.0.0.1:0").expect("a UDP socket");
    names.set_read_timeout(Some(STEP)).expect("a deadline");
    let unused = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr());
    let inward = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr());
    let (unused, inward) = (unused.expect("a port"), inward.expect("a port"));
    let address = |socket: std::io::Result<std::net::SocketAddr>| socket.expect("an address");
    let flags = [
        format!("--forward=8080=tcp:{}", address(web.local_addr())),
        format!("--forward=53=udp:{}", address(names.local_addr())),
        format!("--forward=81=tcp:{unused}"),
        format!("--listen=tcp:{inward}=3:80"),
    ];
    let _device = bench.device_with(&flags);
    let guest = bench.boot();
    let remote = &guest.remote;

    // The guest asks, shuts down sending, and gets a page.
    let server = thread::spawn(move || {
        let (mut stream, _) = web.accept().expect("the guest's connection");
        let mut question = Vec::new();
        stream.read_to_end(&mut question).expect("a question");
        stream
            .write_all(&Pattern::bytes(2, PAGE as usize))
            .expect("sent");
        sha256(&question)
    });
    let connect = Command::Connect { cid: 2, port: 8080 };
    let socket = remote.socket(connect, STEP).expect("connected");
    send(&guest, socket, 1, QUESTION);
    let how = ShutdownDirection::Send;
    remote
        .run(Command::Shutdown { socket, how }, STEP)
        .expect("shut down");
    let page = remote.run(receive(socket, None), STEP).expect("a page");
    assert_eq!(page.sha256, Some(expected(2, PAGE)));
    assert!(page.end && page.errno.is_none(), "{page:?}");
    assert_eq!(server.join().expect("the server"), expected(1, QUESTION));

    // A client asks the guest.
    let listener = remote.socket(Command::Listen { port: 80 }, STEP);
    let listener = listener.expect("a listener");
    let accepting = remote.start(Command::Accept { socket: listener });
    let client = thread::spawn(move || {
        let mut stream = TcpStream::connect(inward).expect("connected");
        let question = Pattern::bytes(3, QUESTION as usize);
        stream.write_all(&question).expect("sent");
        stream.shutdown(Shutdown::Write).expect("shut down");
        let mut page = Vec::new();
        stream.read_to_end(&mut page).expect("a page");
        sha256(&page)
    });
    let socket = accepting.socket(STEP).expect("accepted");
    let question = remote.run(receive(socket, None), STEP).expect("a question");
    assert_eq!(question.sha256, Some(expected(3, QUESTION)));
    send(&guest, socket, 4, PAGE);
    remote.run(Command::Close { socket }, STEP).expect("closed");
    assert_eq!(client.join().expect("the client"), expected(4, PAGE));

    // Each message of a SEQPACKET connection is one datagram.
    let kind = Kind::SeqPacket;
    let call = |call| remote.run(Command::Call(call), STEP).expect("an answer");
    let socket = call(Call::Socket { kind }).socket.expect("a socket");
    let (cid, port) = (2, 53);
    assert_eq!(call(Call::Connect { socket, cid, port }).errno, None);
    for (seed, len) in [(5, 40), (6, 1400)] {
        let sent = call(Call::Send {
            socket,
            seed,
            len,
            now: false,
        });
        assert_eq!(sent.errno, None);
        let mut datagram = [0; 2000];
        let (got, from) = names.recv_from(&mut datagram).expect("a query");
        assert_eq!(sha256(&datagram[..got]), expected(seed, len as u64));
        names.send_to(&datagram[..got / 2], from).expect("sent");
        let flags = RecvFlags::default();
        let answer = call(Call::Receive {
            socket,
            len: 2000,
            flags,
        });
        assert_eq!((answer.errno, answer.bytes), (None, len as u64 / 2));
    }

    let refused = remote.run(Command::Connect { cid: 2, port: 81 }, STEP);
    assert_eq!(
        refused.expect("an answer").errno.as_deref(),
        Some("ECONNRESET")
    );
    let mut nothing = TcpStream::connect(inward).expect("connected");
    drop(guest);
    let error = nothing.read(&mut [0; 1]).expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    Ok(())
}

fn send(guest: &Guest, socket: Socket, seed: u64, len: u64) {
    let source = Source::Pattern { seed, len };
    let chunks = vec![65536];
    let sent = guest.remote.run(
        Command::Send {
            socket,
            source,
            chunks,
        },
        STEP,
    );
    assert_eq!(sent.expect("sent").errno, None);
}
