//! What the tests of the connector share: a request with its answer, a name server, and listeners that
//! do not answer.

#![allow(dead_code, unreachable_pub)] // Each test file uses a part.

pub mod dns;
pub mod stalled;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use zerosock_relay::{
    AddressPolicy, ConnectError, ConnectRequest, Connected, Connector, ConnectorConfig, Network,
    PendingConnect,
};

/// A hang of this length fails a test; nothing else does.
pub const HANG: Duration = Duration::from_secs(60);

pub type Answer = Result<Connected, ConnectError>;

/// A request, and where its answer arrives.
pub struct Asked {
    pub pending: PendingConnect,
    answers: mpsc::Receiver<Answer>,
}

impl Asked {
    /// Waits for the answer; fails if another one follows.
    pub fn answer(&self) -> Answer {
        let answer = self.answers.recv_timeout(HANG).expect("no answer");
        // `done` was consumed with its sender.
        let next = self.answers.recv_timeout(HANG);
        assert!(matches!(next, Err(mpsc::RecvTimeoutError::Disconnected)));
        answer
    }

    /// Whether an answer is there.
    pub fn is_answered(&self) -> bool {
        !matches!(self.answers.try_recv(), Err(mpsc::TryRecvError::Empty))
    }
}

/// A connector with no name servers and hosts but those given.
pub fn connector(name_servers: Vec<SocketAddr>) -> Connector {
    Connector::start(ConnectorConfig {
        name_servers,
        hosts: "/nonexistent".into(),
        resolv_conf: "/nonexistent".into(),
        ..ConnectorConfig::default()
    })
    .unwrap()
}

/// A request of a guest that may use the loopback networks.
pub fn request(target: &str) -> ConnectRequest {
    let allow = ["127.0.0.0/8", "::1"].map(network).to_vec();
    ConnectRequest {
        target: target.parse().unwrap(),
        policy: Arc::new(AddressPolicy::for_guests(allow, Vec::new())),
        timeout: HANG / 2,
        keepalive: None,
        first_bytes: Vec::new(),
        attempts: zerosock_relay::connector::ATTEMPTS_AT_ONCE,
    }
}

pub fn network(text: &str) -> Network {
    text.parse().unwrap()
}

pub fn ask(connector: &Connector, request: ConnectRequest) -> Asked {
    let (sender, answers) = mpsc::channel();
    let done = move |answer| sender.send(answer).unwrap();
    let pending = connector.connect(request, Box::new(done));
    Asked { pending, answers }
}

/// Makes a request and waits for its answer.
pub fn connect(connector: &Connector, request: ConnectRequest) -> Answer {
    ask(connector, request).answer()
}

/// The address that a successful request is connected to.
pub fn address(answer: Answer) -> IpAddr {
    answer.unwrap().address.unwrap().ip()
}

/// Listeners on one port of several addresses.
pub fn listeners<const N: usize>(addresses: [&str; N]) -> (u16, [TcpListener; N]) {
    loop {
        let free = TcpListener::bind((addresses[0], 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let bound = addresses.map(|address| TcpListener::bind((address, port)));
        // Another program may have the port of one of the addresses.
        if bound.iter().all(Result::is_ok) {
            return (port, bound.map(Result::unwrap));
        }
    }
}

/// Passes one byte each way between a connected socket and the next connection of a listener.
pub fn exchange(connected: Connected, listener: &TcpListener) {
    let mut ours = std::net::TcpStream::from(connected.socket.into_trusted());
    ours.set_nonblocking(false).unwrap();
    let (mut theirs, _) = listener.accept().unwrap();
    for (from, to) in [(1, 2), (2, 1)] {
        let (from, to) = match from < to {
            true => (&mut ours, &mut theirs),
            false => (&mut theirs, &mut ours),
        };
        from.write_all(b"x").unwrap();
        let mut byte = [0];
        to.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }
}

/// The system has IPv6 on its loopback device; prints a line otherwise.
pub fn has_ipv6() -> bool {
    let has = TcpListener::bind("[::1]:0").is_ok();
    if !has {
        println!("SKIPPED ipv6: the loopback device has no ::1");
    }
    has
}

/// Runs `test` on a thread in a network namespace of its own, with a loopback device. Threads and sockets
/// that it makes are there as well.
pub fn isolated(test: impl FnOnce() + Send + 'static) {
    let inside = thread::spawn(move || {
        if let Err(why) = zerosock_sys::network::isolate_thread() {
            println!("SKIPPED network: no namespace can be made: {why}");
            return;
        }
        let up = Command::new("ip")
            .args(["link", "set", "lo", "up"])
            .status();
        assert!(up.expect("ip(8)").success());
        test();
    });
    if let Err(panic) = inside.join() {
        std::panic::resume_unwind(panic);
    }
}
