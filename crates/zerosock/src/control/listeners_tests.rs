//! Unit tests of `listeners`.

use std::net::{TcpListener, TcpStream};

use rustix::net::sockopt;
use zerosock_sys::account::Budget;

use super::*;

#[test]
fn accepted_sockets_have_the_options_of_the_rule() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let on = socket.local_addr().unwrap();
    let early = TcpStream::connect(on).unwrap();
    let rule = |socket: &TcpListener, seconds: Option<u64>| {
        let mut rule = ListenRule::new(
            ListenAddress::Tcp(on),
            socket.try_clone().unwrap().into(),
            "3:22".parse().unwrap(),
        );
        rule.keepalive = seconds.map(Duration::from_secs);
        Arc::new(ActiveListener::new(rule, None))
    };
    let mut listener = Listener {
        active: rule(&socket, None),
        socket: ListenSocket::Tcp(socket.try_clone().unwrap().into()),
        ready: false,
        early: false,
    };
    let account = Budget::unlimited().account();
    let options = |listener: &Listener| {
        let accepted = listener.accept(&account).unwrap();
        let keepalive = sockopt::socket_keepalive(&accepted.socket).unwrap();
        let idle = sockopt::tcp_keepidle(&accepted.socket).unwrap().as_secs();
        let no_delay = sockopt::tcp_nodelay(&accepted.socket).unwrap();
        (no_delay, keepalive.then_some(idle))
    };
    listener.set_rule(rule(&socket, Some(7)));
    assert_eq!(options(&listener), (true, Some(7)));
    drop(early);
    for keepalive in [Some(9), None] {
        listener.set_rule(rule(&socket, keepalive));
        listener.early = false;
        let _later = TcpStream::connect(on).unwrap();
        assert_eq!(options(&listener), (true, keepalive));
    }
}
