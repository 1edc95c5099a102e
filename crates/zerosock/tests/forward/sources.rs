//! What connects by a rule: attached processes, by name and by any, and guests with several queue pairs.

use std::io::{ErrorKind, Read, Write};

use zerosock::access::{AccessList, Party, Ports, Rule, Verdict};

use super::{ForwardingDaemon, accept, rule, tcp_server};
use crate::common::{PATIENCE, host};

#[test]
fn only_the_named_process_is_forwarded() {
    let (listener, target) = tcp_server();
    let mut named = rule(1, &target);
    named.from = vec![Party::Name("web".parse().unwrap())];
    let lab = ForwardingDaemon::with(0, |config| config.forward = vec![named]);
    let web = lab.process(|process| process.name("web"));
    let other = lab.process(|process| process);
    let stream = web.connect(host(1)).unwrap();
    (&stream).write_all(b"hello").unwrap();
    let mut got = [0; 5];
    accept(&listener).read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
    let error = other.connect(host(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn the_access_list_goes_before_rules_in_both_directions() {
    let (_listener, target) = tcp_server();
    let (socket, on) = super::inward::tcp_listener();
    let deny = |from, to| Rule {
        name: None,
        verdict: Verdict::Deny,
        from: vec![from],
        to: vec![to],
        ports: Ports::all(),
    };
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![rule(1, target)];
        config.listen = vec![super::inward::listening(on, socket, "3:22")];
        config.access =
            AccessList::new([deny(Party::Any, Party::Host), deny(Party::Host, Party::Any)]);
    });
    let mut guest = lab.guest();
    guest.listen(zerosock::Port::new(22), 8).unwrap();
    super::refused(&mut guest, 1);
    assert_eq!((lab.rule(0).opened, lab.rule(0).refused), (0, 0));
    let mut client = std::net::TcpStream::connect(on).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let error = client.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}
