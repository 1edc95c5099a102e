//! Rules that change while connections exist, and sets of rules that are refused.

use std::io::{Read, Write};
use std::net::TcpStream;

use zerosock::Port;
use zerosock::access::{AccessList, Party, Ports, Rule, Verdict};
use zerosock::daemon::{Daemon, DaemonConfig, Reload, ReloadError, StartError};
use zerosock::forward::{ListenAddress, ListenRule, RuleError, RuleName, SameName};

use super::inward::{listening, tcp_listener};
use super::{ForwardingDaemon, accept, refused, rule, tcp_server, with_time_outs};
use crate::common::{deadline, eventually, eventually_with, host};

fn kept(on: std::net::SocketAddr, to: &str) -> ListenRule {
    let (unused, _) = tcp_listener();
    ListenRule {
        socket: None,
        ..listening(on, unused, to)
    }
}

#[test]
fn connections_of_a_removed_rule_continue_and_new_ones_follow_the_new_rules() {
    let (old, old_target) = tcp_server();
    let (new, new_target) = tcp_server();
    let lab = ForwardingDaemon::new(vec![rule(1, &old_target), rule(2, &old_target)]);
    let mut guest = lab.guest();
    let stream = guest.wait_connect(host(1), deadline()).unwrap();
    let mut at_old = accept(&old);
    let reload = Reload {
        forward: vec![rule(1, &new_target)],
        ..Reload::default()
    };
    lab.daemon().reload(reload).unwrap();
    // The drained rule is still counted, as removed.
    let stats = lab.daemon().forward_stats();
    let shown: Vec<_> = stats.iter().map(|it| (it.removed, it.active)).collect();
    assert_eq!(shown, [(false, 0), (true, 1)]);
    guest.wait_send(stream, b"still here", deadline()).unwrap();
    let mut got = [0; 10];
    at_old.read_exact(&mut got).unwrap();
    at_old.write_all(&got).unwrap();
    guest.wait_recv_exact(stream, &mut got, deadline()).unwrap();
    assert_eq!(&got, b"still here");

    guest.wait_connect(host(1), deadline()).unwrap();
    let _at_new = accept(&new);
    refused(&mut guest, 2);
    drop(at_old);
    guest.close(stream);
    eventually_with(&mut guest, "the removed rule gone", |_| {
        lab.daemon().forward_stats().len() == 1
    });
}

#[test]
fn a_listener_that_stays_keeps_its_socket_and_one_that_goes_lets_its_connections_continue() {
    let (stays, on) = tcp_listener();
    let (goes, gone) = tcp_listener();
    let lab = ForwardingDaemon::with(1, |config| {
        config.listen = vec![listening(on, stays, "3:1"), listening(gone, goes, "3:1")];
    });
    let mut guest = lab.guest();
    for port in [1, 2] {
        guest.listen(Port::new(port), 8).unwrap();
    }
    let mut old = with_time_outs(TcpStream::connect(gone).unwrap());
    let at_guest = guest.wait_accept(Port::new(1), deadline()).unwrap();
    let reload = Reload {
        listen: vec![kept(on, "3:2")],
        ..Reload::default()
    };
    lab.daemon().reload(reload).unwrap();
    eventually("no listener", || TcpStream::connect(gone).is_err());
    old.write_all(b"still here").unwrap();
    let mut got = [0; 10];
    guest
        .wait_recv_exact(at_guest, &mut got, deadline())
        .unwrap();
    let _new = with_time_outs(TcpStream::connect(on).unwrap());
    guest.wait_accept(Port::new(2), deadline()).unwrap();
}

#[test]
fn a_daemon_without_rules_gets_them_by_a_reload() {
    let (listener, target) = tcp_server();
    let (socket, on) = tcp_listener();
    let lab = ForwardingDaemon::with(1, |_| {});
    let mut guest = lab.guest();
    refused(&mut guest, 1);
    let reload = Reload {
        forward: vec![rule(1, target)],
        listen: vec![listening(on, socket, "3:1")],
        ..Reload::default()
    };
    lab.daemon().reload(reload).unwrap();
    guest.wait_connect(host(1), deadline()).unwrap();
    accept(&listener);
    guest.listen(Port::new(1), 8).unwrap();
    let _client = TcpStream::connect(on).unwrap();
    guest.wait_accept(Port::new(1), deadline()).unwrap();
}

#[test]
fn a_set_of_rules_with_a_conflict_changes_nothing() {
    let (listener, target) = tcp_server();
    let (socket, on) = tcp_listener();
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![rule(1, &target)];
        config.listen = vec![listening(on, socket, "3:1")];
    });
    let mut guest = lab.guest();
    let name = || "web".parse::<RuleName>().unwrap();
    let (unknown, elsewhere) = tcp_listener();
    drop(unknown);
    for (forward, listen, wanted) in [
        (
            vec![rule(5, "unix:/a"), rule(5, &target)],
            vec![kept(on, "3:1")],
            RuleError::Overlap {
                first: 0,
                second: 1,
                port: Port::new(5),
            },
        ),
        (
            vec![],
            vec![
                kept(on, "3:1").name(name()),
                kept(elsewhere, "3:2").name(name()),
            ],
            RuleError::SameName(SameName {
                kind: "listen",
                first: 0,
                second: 1,
                name: name(),
            }),
        ),
        (
            vec![],
            vec![kept(on, "3:1"), kept(on, "3:2")],
            RuleError::SameListener {
                first: 0,
                second: 1,
                on: ListenAddress::Tcp(on),
            },
        ),
        (
            vec![],
            vec![kept(elsewhere, "3:1")],
            RuleError::NoSocket {
                rule: 0,
                on: ListenAddress::Tcp(elsewhere),
            },
        ),
    ] {
        let reload = Reload {
            forward,
            listen,
            ..Reload::default()
        };
        match lab.daemon().reload(reload) {
            Err(ReloadError::Rules(error)) => assert_eq!(error, wanted),
            other => panic!("{other:?}"),
        }
        // The old rules are in effect.
        guest.wait_connect(host(1), deadline()).unwrap();
        accept(&listener);
        TcpStream::connect(on).unwrap();
    }
    let deny = || Rule {
        name: Some(name()),
        verdict: Verdict::Deny,
        from: vec![Party::Host],
        to: vec![Party::Any],
        ports: Ports::all(),
    };
    let access = AccessList::new([deny(), deny()]);
    let same =
        |error: &RuleError| matches!(error, RuleError::SameName(SameName { kind: "access", .. }));
    let reload = Reload {
        access: access.clone(),
        ..Reload::default()
    };
    let reloaded = lab.daemon().reload(reload).unwrap_err();
    assert!(matches!(&reloaded, ReloadError::Rules(error) if same(error)));
    let config = DaemonConfig {
        access,
        ..DaemonConfig::default()
    };
    let start = Daemon::start(config).unwrap_err();
    assert!(matches!(&start, StartError::Rules(error) if same(error)));
    let start = Daemon::start(DaemonConfig {
        forward: vec![rule(1, "unix:/a"), rule(1, "unix:/b")],
        ..DaemonConfig::default()
    });
    assert!(matches!(start, Err(StartError::Rules(_))), "{start:?}");
}
