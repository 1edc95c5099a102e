//! The programs of a long run: the driver of a guest, the programs of the host, or processes that attach. Each is a process
//! of its own, so that it can be killed. It makes connections to echo services and checks what comes back.
//!
//! Lines on standard input: `go`, `stop`; its end ends the program. Lines on standard output: `ready …`,
//! `done KIND BYTES`, `failed BEGAN ENDED PEER CLASS TEXT`, `stopped`.

use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use zerosock::vsock::{Endpoint, SeqPacket, Stream};
use zerosock::{Address, Cid, Port};
use zerosock_cli::vm::hybrid;
use zerosock_cli::vm::pattern::Pattern;

use super::common::{GUESTS, HANG, Random, STEADY, now};

/// Ports: of the guests' echo services, of the host's, and of the forwarding rules. `LATE` comes and goes.
pub(super) const ECHO: u32 = 1;
const MESSAGES: u32 = 2;
const HOST: u32 = 7;
pub(super) const TCP: u32 = 80;
pub(super) const LATE: u32 = 81;
pub(super) const UDP: u32 = 53;

static RUNNING: AtomicBool = AtomicBool::new(false);

/// Runs the program of this name: `guestCID`, `attached` or `host`.
pub(super) fn play(dir: &Path, name: &str, seed: u64) -> io::Result<()> {
    let (go, started) = std::sync::mpsc::channel();
    let mut ready = "ready".to_owned();
    let guest = match name {
        "host" => {
            ready += &serve_host(dir)?;
            None
        }
        "attached" => None,
        guest => Some(serve_guest(&dir.join(guest.replace("guest", "vm")))?),
    };
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            RUNNING.store(line == "go", Ordering::Relaxed);
            let _ = go.send(());
        }
        std::process::exit(0);
    });
    println!("{ready}");
    let _ = started.recv();
    thread::scope(|scope| {
        for number in 0..4 {
            let mut random = Random::new(seed << 8 | number);
            let guest = guest.as_ref();
            scope.spawn(move || {
                while RUNNING.load(Ordering::Relaxed) {
                    match (guest, name) {
                        (None, "host") => as_host(dir, &mut random),
                        (None, _) => as_attached(dir, &mut random),
                        (Some(guest), _) => drop(as_endpoint(guest, &mut random)),
                    }
                    thread::sleep(Duration::from_millis(random.below(300)));
                }
            });
        }
    });
    println!("stopped");
    loop {
        thread::park();
    }
}

fn serve_guest(socket: &Path) -> io::Result<Endpoint> {
    let deadline = Instant::now() + HANG;
    let guest = loop {
        // The front-end before this one may still have the place.
        match Endpoint::builder().background().attach_device(socket) {
            Ok(guest) => break guest,
            Err(error) if Instant::now() > deadline => return Err(io::Error::other(error)),
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    };
    let (streams, messages) = (
        guest.listen(Port::new(ECHO), 128)?,
        guest.listen_seqpacket(Port::new(MESSAGES), 128)?,
    );
    thread::spawn(move || {
        while let Ok((stream, _)) = streams.accept() {
            thread::spawn(move || echo(&stream, |how| stream.shutdown(how)));
        }
    });
    thread::spawn(move || {
        while let Ok((socket, _)) = messages.accept() {
            thread::spawn(move || {
                let mut buffer = vec![0; 1 << 16];
                while let Ok(Some(received)) = socket.recv(&mut buffer) {
                    if socket.send(&buffer[..received.len]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    Ok(guest)
}

/// Serves the hybrid sockets and the targets of rules; returns the addresses of the latter.
fn serve_host(dir: &Path) -> io::Result<String> {
    for cid in GUESTS {
        let listener = hybrid::listen(&dir.join(format!("uds{cid}")), HOST)?;
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                thread::spawn(move || echo(&stream, |how| stream.shutdown(how)));
            }
        });
    }
    let tcp = TcpListener::bind("127.0.0.1:0")?;
    let udp = UdpSocket::bind("127.0.0.1:0")?;
    let addresses = format!(" {} {}", tcp.local_addr()?, udp.local_addr()?);
    thread::spawn(move || {
        for stream in tcp.incoming().flatten() {
            thread::spawn(move || echo(&stream, |how| stream.shutdown(how)));
        }
    });
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        loop {
            if let Ok((bytes, from)) = udp.recv_from(&mut buffer) {
                let _ = udp.send_to(&buffer[..bytes], from);
            }
        }
    });
    Ok(addresses)
}

/// Sends back what comes, and the end after it.
fn echo(mut stream: impl Read + Write + Copy, shutdown: impl FnOnce(Shutdown) -> io::Result<()>) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(bytes @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..bytes]).is_err() {
            return;
        }
    }
    let _ = shutdown(Shutdown::Write);
}

fn as_host(dir: &Path, random: &mut Random) {
    let cid = random.guest();
    let connect = || {
        let (stream, _) = hybrid::connect(&dir.join(format!("uds{cid}")), ECHO, HANG)
            .map_err(io::Error::other)?;
        stream.set_read_timeout(Some(HANG))?;
        stream.set_write_timeout(Some(HANG))?;
        Ok(stream)
    };
    report(
        "program",
        &format!("guest{cid}"),
        connect,
        |stream: &UnixStream| exchange(stream, |how| stream.shutdown(how), random),
    );
}

/// Attaches, makes some connections, and detaches.
fn as_attached(dir: &Path, random: &mut Random) {
    let connect = || Endpoint::attach(dir.join("attach")).map_err(io::Error::other);
    report("attach", "serve", connect, |endpoint: &Endpoint| {
        let times = 1 + random.below(4);
        // One that has ended cannot be used again.
        let _ = (0..times).all(|_| as_endpoint(endpoint, random));
        Ok(0)
    });
}

/// Makes one connection; returns whether it was as it should be.
fn as_endpoint(endpoint: &Endpoint, random: &mut Random) -> bool {
    let host = |port| Address::new(Cid::HOST, Port::new(port));
    let cid = random.guest();
    let (guest, peer) = (Cid::new(cid), format!("guest{cid}"));
    let messages = |to| {
        move || {
            let socket = endpoint.connect_seqpacket(to)?;
            // Less for datagrams: one that is lost is sent again.
            let patience = if to.cid == Cid::HOST { HANG / 12 } else { HANG };
            socket.set_read_timeout(Some(patience))?;
            socket.set_write_timeout(Some(HANG))?;
            Ok(socket)
        }
    };
    let stream = |kind, peer: &str, to, random: &mut Random| {
        let connect = || {
            let stream = endpoint.connect(to)?;
            stream.set_read_timeout(Some(HANG))?;
            stream.set_write_timeout(Some(HANG))?;
            Ok(stream)
        };
        report(kind, peer, connect, |stream: &Stream| {
            exchange(stream, |how| stream.shutdown(how), random)
        })
    };
    match random.below(8) {
        0 | 1 if endpoint.cid() != guest => report(
            "messages",
            &peer,
            messages(Address::new(guest, Port::new(MESSAGES))),
            |to| exchange_messages(to, 20_000, 1, random),
        ),
        2..=4 if endpoint.cid() != guest => stream(
            "sibling",
            &peer,
            Address::new(guest, Port::new(ECHO)),
            random,
        ),
        5 => report("datagrams", "udp", messages(host(UDP)), |to| {
            exchange_messages(to, 1000, 12, random)
        }),
        6 => stream("late-rule", "late", host(LATE), random),
        // Attached processes have no hybrid sockets here.
        7 if STEADY.contains(&endpoint.cid().get()) => stream("hybrid", "host", host(HOST), random),
        _ => stream("rule", "tcp", host(TCP), random),
    }
}

/// Connects, exchanges, and prints what came of it. Returns whether all was as it should be.
fn report<S>(
    kind: &str,
    peer: &str,
    connect: impl FnOnce() -> io::Result<S>,
    exchange: impl FnOnce(&S) -> io::Result<u64>,
) -> bool {
    let began = now();
    let failed = |class: &str, error: io::Error| {
        println!("failed {began} {} {peer} {class} {kind}: {error}", now());
        false
    };
    match connect() {
        Err(error) => failed("connect", error),
        Ok(socket) => match exchange(&socket) {
            Ok(bytes) => {
                println!("done {kind} {bytes}");
                true
            }
            Err(error) => {
                let class = match error.kind() {
                    ErrorKind::InvalidData => "wrong",
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => "hang",
                    _ => "ended",
                };
                failed(class, error)
            }
        },
    }
}

fn wrong(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("wrong contents {what}"))
}

/// Sends a pattern in pieces with pauses, and compares what comes back, up to the end. Most are short, some last seconds.
fn exchange<S: Sync>(
    stream: &S,
    shutdown: impl FnOnce(Shutdown) -> io::Result<()> + Send,
    random: &mut Random,
) -> io::Result<u64>
where
    for<'s> &'s S: Read + Write,
{
    let (pieces, most, pause) = match random.below(10) {
        0..5 => (random.below(2), 200, 0),
        5..8 => (1 + random.below(4), 64 << 10, 10),
        _ => (20 + random.below(80), 32 << 10, 150),
    };
    let (seed, choices) = (random.next(), random.next());
    thread::scope(|scope| {
        let sending = scope.spawn(move || -> io::Result<u64> {
            let (mut pattern, mut random) = (Pattern::new(seed), Random::new(choices));
            let (mut buffer, mut sent, mut to) = (vec![0; most], 0, stream);
            for _ in 0..pieces {
                let piece = &mut buffer[..1 + random.below(most as u64) as usize];
                pattern.fill(piece);
                to.write_all(piece)?;
                sent += piece.len() as u64;
                thread::sleep(Duration::from_millis(random.below(pause + 1)));
            }
            shutdown(Shutdown::Write)?;
            Ok(sent)
        });
        let receive = || {
            let (mut pattern, mut received, mut from) = (Pattern::new(seed), 0, stream);
            let (mut buffer, mut expected) = (vec![0; 1 << 16], vec![0; 1 << 16]);
            loop {
                let bytes = from.read(&mut buffer)?;
                if bytes == 0 {
                    return Ok(received);
                }
                pattern.fill(&mut expected[..bytes]);
                if buffer[..bytes] != expected[..bytes] {
                    return Err(wrong(format_args!("after byte {received}")));
                }
                received += bytes as u64;
            }
        };
        let received = receive();
        let sent = sending.join().expect("no panic");
        let (received, sent) = (received?, sent?);
        if received != sent {
            let error = format!("the end came after {received} of {sent} bytes");
            return Err(io::Error::new(ErrorKind::UnexpectedEof, error));
        }
        Ok(received)
    })
}

/// Sends messages, and compares each with what comes back. Sends one without an answer again, up to `tries` times.
fn exchange_messages(
    socket: &SeqPacket,
    most: u64,
    tries: u32,
    random: &mut Random,
) -> io::Result<u64> {
    let (mut buffer, mut total, mut sent) = (vec![0; 1 << 16], 0, Vec::new());
    'messages: for number in 0..random.below(40) {
        let message = Pattern::bytes(random.next(), 1 + random.below(most) as usize);
        for attempt in 1.. {
            socket.send(&message)?;
            match socket.recv(&mut buffer) {
                Ok(None) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(Some(received)) if buffer[..received.len] == message => {
                    total += received.len as u64;
                    sent.push(message);
                    thread::sleep(Duration::from_millis(random.below(100)));
                    continue 'messages;
                }
                // The answer to one that was sent again.
                Ok(Some(received))
                    if tries > 1 && sent.iter().any(|it| buffer[..received.len] == *it) => {}
                Ok(Some(_)) => return Err(wrong(format_args!("of message {number}"))),
                Err(error) if attempt >= tries || error.kind() == ErrorKind::ConnectionReset => {
                    return Err(error);
                }
                Err(_) => {}
            }
        }
    }
    Ok(total)
}
