//! Clients of TCP and Unix listeners to guests, attached processes and services.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use zerosock::Port;
use zerosock::forward::{ListenAddress, ListenRule};
use zerosock::vsock::{Endpoint, Listener};

use super::common::{PATIENCE, assert_bytes, bytes, deadline, eventually};
use super::{Lab, with_time_outs};

/// A bound socket of a rule, and its address.
pub(super) fn tcp_listener() -> (OwnedFd, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let on = listener.local_addr().unwrap();
    (listener.into(), on)
}

pub(super) fn listening(on: SocketAddr, socket: OwnedFd, to: &str) -> ListenRule {
    ListenRule::new(ListenAddress::Tcp(on), socket, to.parse().unwrap())
}

fn connect(on: SocketAddr) -> TcpStream {
    with_time_outs(TcpStream::connect(on).unwrap())
}

/// The client is reset.
#[track_caller]
fn is_reset(mut client: TcpStream) {
    let error = client.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// Sends what the first connection receives back until its end.
fn echo(listener: Listener) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let (mut stream, _) = listener.accept_timeout(PATIENCE).unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        stream.write_all(&got).unwrap();
    })
}

#[track_caller]
fn there_and_back(mut client: TcpStream) {
    let sent = bytes(5, 3 << 20);
    client.write_all(&sent).unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut got = Vec::new();
    client.read_to_end(&mut got).unwrap();
    assert_bytes(&got, &sent);
}

#[test]
fn a_tcp_client_reaches_a_guest() {
    let (socket, on) = tcp_listener();
    let lab = Lab::with(1, |config| {
        config.listen = vec![listening(on, socket, "3:22")]
    });
    let guest = lab.endpoint();
    let echo = echo(guest.listen(Port::new(22), 8).unwrap());
    there_and_back(connect(on));
    echo.join().unwrap();
    lab.until_none_is_left();
    let stats = lab.rule(0);
    assert_eq!((stats.opened, stats.refused), (1, 0));
    assert_eq!((stats.bytes_sent, stats.bytes_received), (3 << 20, 3 << 20));
}

#[test]
fn a_tcp_client_reaches_an_attached_process_by_name() {
    let (socket, on) = tcp_listener();
    let lab = Lab::with(0, |config| {
        config.listen = vec![listening(on, socket, "name:web:80")];
    });
    is_reset(connect(on));
    let web = lab.process(|process| process.name("web"));
    let echo = echo(web.listen(Port::new(80), 8).unwrap());
    there_and_back(connect(on));
    echo.join().unwrap();
    drop(web);
    eventually("the name gone", || {
        let mut client = connect(on);
        client.read(&mut [0; 1]).is_err()
    });
}

#[test]
fn a_tcp_client_reaches_a_service() {
    let (socket, on) = tcp_listener();
    let lab = Lab::with(0, |config| {
        config.listen = vec![listening(on, socket, "host:80")];
    });
    is_reset(connect(on));
    let service = Endpoint::builder()
        .ports([Port::new(80)])
        .attach_as_host(lab.at("attach"))
        .unwrap();
    let echo = echo(service.listen(Port::new(80), 8).unwrap());
    there_and_back(connect(on));
    echo.join().unwrap();
}

#[test]
fn unix_clients_reach_a_guest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let socket = UnixListener::bind(&path).unwrap();
    let rule = ListenRule::new(
        ListenAddress::Unix(path.clone()),
        socket.into(),
        "3:22".parse().unwrap(),
    );
    let lab = Lab::with(1, |config| config.listen = vec![rule]);
    let guest = lab.endpoint();
    let echo = echo(guest.listen(Port::new(22), 8).unwrap());
    let mut client = UnixStream::connect(&path).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.write_all(b"hello").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut got = String::new();
    client.read_to_string(&mut got).unwrap();
    assert_eq!(got, "hello");
    echo.join().unwrap();
}

#[test]
fn a_guest_that_does_not_listen_or_is_not_there_resets_the_client() {
    let (socket, on) = tcp_listener();
    let lab = Lab::with(1, |config| {
        config.listen = vec![listening(on, socket, "3:22")]
    });
    // No driver runs.
    is_reset(connect(on));
    let mut guest = lab.guest();
    let client = connect(on);
    let reset = thread::spawn(move || is_reset(client));
    super::common::eventually_with(&mut guest, "a reset", |_| reset.is_finished());
    reset.join().unwrap();
    eventually("counted", || lab.rule(0).refused == 2);
    assert_eq!(lab.rule(0).opened, 0);
}

#[test]
fn clients_from_other_networks_and_over_the_limit_are_reset() {
    let (socket, on) = tcp_listener();
    let (other, denied_on) = tcp_listener();
    let mut limited = listening(on, socket, "3:22");
    limited.max_connections = Some(2);
    let mut denied = listening(denied_on, other, "3:22");
    denied.deny = vec!["127.0.0.0/8".parse().unwrap()];
    let lab = Lab::with(1, |config| config.listen = vec![limited, denied]);
    let mut guest = lab.guest();
    guest.listen(Port::new(22), 8).unwrap();
    is_reset(connect(denied_on));
    let first = connect(on);
    let stream = guest.wait_accept(Port::new(22), deadline()).unwrap();
    let _second = connect(on);
    guest.wait_accept(Port::new(22), deadline()).unwrap();
    is_reset(connect(on));
    // A place is free again once the first connection has ended.
    drop(first);
    guest.close(stream).unwrap();
    super::common::eventually_with(&mut guest, "a free place", |_| lab.rule(0).active == 1);
    let _third = connect(on);
    guest.wait_accept(Port::new(22), deadline()).unwrap();
    assert_eq!((lab.rule(0).refused, lab.rule(1).refused), (1, 1));
}

#[test]
fn many_clients_reach_devices_of_several_workers() {
    let (socket, on) = tcp_listener();
    let lab = Lab::with(1, |config| {
        config.workers = 2;
        config.listen = vec![listening(on, socket, "3:22")];
    });
    let guest = lab.endpoint();
    let listener = guest.listen(Port::new(22), 256).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..200 {
                let (mut stream, _) = listener.accept_timeout(PATIENCE).unwrap();
                let mut number = [0; 8];
                stream.read_exact(&mut number).unwrap();
                stream.write_all(&number).unwrap();
            }
        });
        for number in 0..200u64 {
            let mut client = connect(on);
            client.write_all(&number.to_le_bytes()).unwrap();
            let mut got = [0; 8];
            client.read_exact(&mut got).unwrap();
            assert_eq!(u64::from_le_bytes(got), number);
        }
    });
    lab.until_none_is_left();
    assert_eq!(lab.rule(0).opened, 200);
}
