//! Reload: which settings change while a daemon runs, and which connections stay.

use super::*;
use crate::common::driver::WaitError;
use crate::common::{self, assert_bytes, bytes, connect_guest, eventually, eventually_with, host};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use zerosock::access::{AccessList, Cids, Party, Ports, Rule, Verdict};
use zerosock::daemon::{HostSide, Reload, ReloadError, VmConfig};

fn rule(verdict: Verdict, from: Party, to: Party, ports: std::ops::RangeInclusive<u32>) -> Rule {
    let (first, last) = (Port::new(*ports.start()), Port::new(*ports.end()));
    Rule {
        name: None,
        verdict,
        from: vec![from],
        to: vec![to],
        ports: Ports::new([first..=last]).unwrap(),
    }
}

fn cid(cid: u32) -> Party {
    Party::Cids(Cids::new(Cid::new(cid), Cid::new(cid)).unwrap())
}

fn reload(lab: &AttachDaemon, rules: impl IntoIterator<Item = Rule>) {
    let access = AccessList::new(rules);
    lab.daemon()
        .reload(Reload {
            access,
            ..Reload::default()
        })
        .unwrap();
}

/// A VM at sockets in the lab's directory.
fn vm(lab: &AttachDaemon, cid: u32, groups: &str) -> (Vm, VmConfig) {
    let dir = lab.path.parent().unwrap();
    let vm = Vm {
        cid,
        socket: dir.join(format!("vm{cid}.sock")),
        uds_path: dir.join(format!("vm{cid}.vsock")),
    };
    for path in [&vm.socket, &vm.uds_path] {
        let _ = std::fs::remove_file(path);
    }
    let config = VmConfig {
        cid: Cid::new(cid),
        listener: UnixListener::bind(&vm.socket).unwrap(),
        host: HostSide::Hybrid {
            path: vm.uds_path.clone(),
            listener: UnixListener::bind(&vm.uds_path).unwrap(),
            messages: None,
        },
        buf_alloc: 262_144,
        queue_size: 256,
        groups: vec![groups.into()],
        require_sealed_memory: false,
        stopped_timeout: None,
        guest_endpoints: None,
        succession: None,
    };
    (vm, config)
}

/// Whether one endpoint can connect to a port of the other, which listens on all ports.
fn reaches(from: &mut Driver, to: &mut Driver, port: u32) -> bool {
    let stream = from
        .connect(Address::new(to.cid(), Port::new(port)))
        .unwrap();
    let mut decided = None;
    all([from, to], "decided", |[from, _]| {
        decided = from
            .state(stream)
            .filter(|state| *state != StreamState::Connecting);
        decided.is_some()
    });
    from.abort(stream);
    decided == Some(StreamState::Connected)
}

#[test]
fn the_access_list_applies_to_all_endpoints_in_both_directions() {
    for workers in [1, 3] {
        let lab = AttachDaemon::with(
            1,
            |config| config.workers = workers,
            |attach| attach.service_uids = vec![rustix::process::geteuid().as_raw()],
        );
        let mut guest = lab.guest(0);
        let mut db = lab.process("db");
        let mut web = lab.process("web");
        let mut service = services::service(&lab, &[1, 2]);
        let program = UnixListener::bind(format!("{}_3", lab.vms[0].uds_path.display())).unwrap();
        for driver in [&mut guest, &mut db.driver, &mut web.driver] {
            for port in [1, 2] {
                driver.listen(Port::new(port), 64).unwrap();
            }
        }
        use Verdict::{Allow, Deny};
        let name = |name: &str| Party::Name(name.parse().unwrap());
        let rules = [
            // By name; the first matching rule decides.
            rule(Allow, name("web"), name("db"), 1..=1),
            rule(Deny, Party::Any, name("db"), 1..=1),
            // By CID, in one direction.
            rule(Deny, cid(3), cid(db.cid.get()), 2..=2),
            // To and from the host: services and hybrid sockets count as one.
            rule(Deny, cid(3), Party::Host, 1..=1),
            rule(Deny, cid(3), Party::Host, 3..=3),
            rule(Deny, Party::Host, cid(3), 2..=2),
        ];
        let uds_path = lab.vms[0].uds_path.clone();
        let hybrid = |guest: &mut Driver, port: u32| {
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| connect_guest(&uds_path, port).is_ok());
                eventually_with(guest, "decided", |_| asking.is_finished());
                asking.join().unwrap()
            })
        };
        let to_program = |guest: &mut Driver| guest.wait_connect(host(3), deadline()).is_ok();
        for (rules, list) in [(&rules[..0], false), (&rules[..], true), (&[], false)] {
            reload(&lab, rules.iter().cloned());
            let (guest, db, web) = (&mut guest, &mut db.driver, &mut web.driver);
            let service = &mut service.driver;
            assert!(reaches(web, db, 1), "{list}");
            assert_eq!(reaches(guest, db, 1), !list);
            assert_eq!(reaches(service, db, 1), !list);
            assert_eq!(reaches(guest, db, 2), !list);
            assert!(reaches(db, guest, 2) && reaches(web, db, 2));
            assert_eq!(reaches(guest, service, 1), !list);
            assert!(reaches(guest, service, 2) && reaches(web, service, 1));
            assert_eq!(to_program(guest), !list);
            assert_eq!(reaches(service, guest, 2), !list);
            assert!(reaches(service, guest, 1));
            assert_eq!(hybrid(guest, 2), !list);
            assert!(hybrid(guest, 1));
        }
        drop(program);
    }
}

#[test]
fn an_established_stream_continues_when_a_new_rule_denies_it() {
    const LEN: usize = 8 << 20;
    for workers in [1, 3] {
        let tune = |config: &mut DaemonConfig| {
            config.workers = workers;
            // A slow machine must not look like a stalled receiver: its bytes would be copied.
            config.hold = common::PATIENCE;
        };
        let lab = AttachDaemon::with(2, tune, |_| {});
        let mut one = lab.guest(0);
        let mut two = lab.guest(1);
        two.listen(PORT, 8).unwrap();
        let (from, to) = connected(&mut one, &mut two);
        let sent = bytes(6, LEN);
        let (mut done, mut got, mut ended) = (0, Vec::new(), false);
        for round in 1..=8 {
            all([&mut one, &mut two], "bytes", |[one, two]| {
                push(one, from, &sent, &mut done);
                pull(two, to, &mut got, &mut ended);
                got.len() >= LEN * round / 10
            });
            // Denied, then decided by groups, then allowed again, with bytes in flight.
            let groups = match round % 2 {
                0 => "default",
                _ => "elsewhere",
            };
            let deny = rule(Verdict::Deny, Party::Any, Party::Any, 0..=u32::MAX - 1);
            let rules: Vec<Rule> = (round % 3 == 0).then_some(deny).into_iter().collect();
            let allowed = rules.is_empty() && groups == "default";
            let access = AccessList::new(rules);
            let groups = [(Cid::new(3), vec![groups.to_owned()])].into();
            lab.daemon()
                .reload(Reload {
                    groups,
                    access,
                    ..Reload::default()
                })
                .unwrap();
            assert_eq!(reaches(&mut one, &mut two, PORT.get()), allowed, "{round}");
        }
        all([&mut one, &mut two], "the end", |[one, two]| {
            push(one, from, &sent, &mut done);
            pull(two, to, &mut got, &mut ended);
            ended
        });
        assert_bytes(&got, &sent);
        assert_eq!(lab.stats().copied_bytes, 0);
    }
}

#[test]
fn vms_come_and_go_and_their_cids_with_them() {
    for workers in [1, 3] {
        let lab = AttachDaemon::with(1, |config| config.workers = workers, |_| {});
        let mut stays = lab.guest(0);
        let mut process = lab.process("p");
        stays.listen(PORT, 64).unwrap();
        process.driver.listen(PORT, 64).unwrap();
        let (kept, there) = connected(&mut stays, &mut process.driver);
        for round in 0..10 {
            let mut vm = None;
            // As soon as the VM of the previous round is removed.
            eventually("the CID free", || {
                let (new, config) = self::vm(&lab, 9, "default");
                vm = Some(new);
                let add = vec![config];
                let added = lab.daemon().reload(Reload {
                    add,
                    ..Reload::default()
                });
                added.is_ok()
            });
            let vm = vm.unwrap();
            let mut guest = Driver::attach(DriverConfig::new(&vm.socket)).unwrap();
            guest.listen(PORT, 8).unwrap();
            // It connects to existing endpoints and the host, and they connect to it.
            let (stream, _) = connected(&mut guest, &mut stays);
            connected(&mut process.driver, &mut guest);
            let program = UnixListener::bind(format!("{}_{round}", vm.uds_path.display())).unwrap();
            let out = guest.wait_connect(host(round), deadline()).unwrap();
            let (mut socket, _) = program.accept().unwrap();
            socket.write_all(b"in").unwrap();
            let mut got = [0; 2];
            guest.wait_recv(out, &mut got, deadline()).unwrap();
            // No second VM with this CID, and no process.
            let (_, again) = self::vm(&lab, 9, "default");
            let add = vec![again];
            let error = lab.daemon().reload(Reload {
                add,
                ..Reload::default()
            });
            assert!(
                matches!(error, Err(ReloadError::CidTaken(cid)) if cid.get() == 9),
                "{error:?}"
            );
            assert!(matches!(
                lab.ask(&numbered(9)),
                Err(AttachError::CidTaken(_))
            ));
            let remove = vec![Cid::new(9)];
            lab.daemon()
                .reload(Reload {
                    remove,
                    ..Reload::default()
                })
                .unwrap();
            // With a front-end or without, its connections end.
            eventually_with(&mut guest, "the end", |guest| {
                guest.state(stream) == Some(StreamState::Reset)
            });
            assert_eq!(socket.read(&mut got).unwrap_or(0), 0);
            drop(guest);
            let refused = stays.wait_connect(at(Cid::new(9)), deadline());
            assert!(matches!(refused, Err(WaitError::Refused)), "{refused:?}");
            // The CID becomes free: a process takes and releases it.
            eventually("the CID", || lab.ask(&numbered(9)).is_ok());
            eventually("only one attached", || lab.stats().attached == 1);
            let path = &vm.socket;
            // The reaper closes the listener.
            eventually("the end of the listener", || {
                std::os::unix::net::UnixStream::connect(path).is_err()
            });
        }
        let sent = bytes(8, 1 << 20);
        let got = transfer((&mut stays, kept), (&mut process.driver, there), &sent);
        assert_bytes(&got, &sent);
    }
}

#[test]
fn an_order_that_cannot_be_carried_out_changes_nothing() {
    let lab = AttachDaemon::with(2, |_| {}, |attach| attach.max_processes = 1);
    let mut one = lab.guest(0);
    let mut two = lab.guest(1);
    two.listen(PORT, 8).unwrap();
    let deny = rule(Verdict::Deny, Party::Any, Party::Any, 0..=u32::MAX - 1);
    let process = lab.process("p");
    let (_, taken) = vm(&lab, process.cid.get(), "default");
    type Expected = fn(&ReloadError) -> bool;
    let orders: [(Reload, Expected); 3] = [
        (
            Reload {
                remove: vec![Cid::new(77)],
                ..Reload::default()
            },
            |error| matches!(error, ReloadError::UnknownVm(cid) if cid.get() == 77),
        ),
        (
            Reload {
                groups: [(Cid::new(3), vec![]), (Cid::new(78), vec![])].into(),
                remove: vec![Cid::new(4)],
                ..Reload::default()
            },
            |error| matches!(error, ReloadError::UnknownVm(cid) if cid.get() == 78),
        ),
        (
            Reload {
                add: vec![taken],
                remove: vec![Cid::new(4)],
                ..Reload::default()
            },
            |error| matches!(error, ReloadError::CidTaken(_)),
        ),
    ];
    for (order, expected) in orders {
        let order = Reload {
            access: AccessList::new([deny.clone()]),
            ..order
        };
        let error = lab.daemon().reload(order).unwrap_err();
        assert!(expected(&error), "{error}");
        assert!(reaches(&mut one, &mut two, PORT.get()));
    }
    // New limits and users for attaching; attached processes stay.
    let mut terms =
        AttachConfig::new(attach::listen(&lab.path.with_extension("x")).unwrap()).terms();
    terms.max_processes = 2;
    let with = |terms: &attach::AttachTerms| Reload {
        attach: Some(terms.clone()),
        ..Reload::default()
    };
    assert!(matches!(lab.ask(&named("q")), Err(AttachError::Full)));
    lab.daemon().reload(with(&terms)).unwrap();
    drop(lab.process("q"));
    terms.allowed_uids = vec![4_000_000_001];
    lab.daemon().reload(with(&terms)).unwrap();
    assert!(matches!(
        lab.ask(&named("r")),
        Err(AttachError::NotPermitted)
    ));
    assert_eq!(lab.daemon().processes()[0].cid, process.cid);
    let none = Daemon::start(DaemonConfig::default()).unwrap();
    let refused = none.reload(with(&terms));
    assert!(matches!(refused, Err(ReloadError::NoAttachSocket)));
    none.shutdown();
}

#[test]
fn a_service_of_a_removed_user_keeps_its_ports_and_gets_no_others() {
    use super::services::service;
    let lab = AttachDaemon::with(
        1,
        |config| config.workers = 2,
        |attach| attach.service_uids = vec![rustix::process::geteuid().as_raw()],
    );
    let mut guest = lab.guest(0);
    let mut one = service(&lab, &[10]);
    let mut terms =
        AttachConfig::new(attach::listen(&lab.path.with_extension("x")).unwrap()).terms();
    terms.service_uids = vec![4_000_000_001];
    let without = Reload {
        attach: Some(terms.clone()),
        ..Reload::default()
    };
    lab.daemon().reload(without).unwrap();
    let error = one.control.claim(&[Port::new(11)]).unwrap_err();
    assert!(matches!(error, AttachError::NotPermitted), "{error}");
    assert_eq!(lab.stats().claimed_ports, 1);
    let to = Address::new(Cid::HOST, Port::new(10));
    for _ in 0..3 {
        // It keeps its ports and place, and can release ports.
        assert!(reaches(&mut guest, &mut one.driver, 10));
    }
    one.control.release(&[Port::new(10)]).unwrap();
    let error = one.control.claim(&[Port::new(10)]).unwrap_err();
    assert!(matches!(error, AttachError::NotPermitted), "{error}");
    let refused = guest.wait_connect(to, common::deadline());
    assert!(refused.is_err(), "nobody's");
    // Back on the list, it may claim.
    terms.service_uids = vec![rustix::process::geteuid().as_raw()];
    let with = Reload {
        attach: Some(terms),
        ..Reload::default()
    };
    lab.daemon().reload(with).unwrap();
    one.control.claim(&[Port::new(10), Port::new(11)]).unwrap();
    assert!(reaches(&mut guest, &mut one.driver, 10));
}
