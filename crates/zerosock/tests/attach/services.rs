//! Services: processes that share CID 2, each with its own ports.

use std::io::Read;
use std::os::unix::net::UnixListener;

use super::*;
use crate::common::driver::WaitError;
use crate::common::{self, assert_bytes, bytes, connect_guest, eventually, eventually_with, host};
use zerosock::attach::{LAST_CLAIMABLE, MAX_CLAIMS, ServiceRequest, Serving};
use zerosock::vsock::Fault;

/// A service; the test runs its driver.
pub(crate) struct Service {
    pub(crate) driver: Driver,
    pub(crate) control: Client,
}

fn me() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A daemon on which the test's own user may run services.
fn lab_with(vms: u32, workers: usize, tune: impl FnOnce(&mut AttachConfig)) -> AttachDaemon {
    AttachDaemon::with(
        vms,
        |config| {
            config.workers = workers;
            // A slow machine must not look like a stalled receiver: its bytes would be copied.
            config.hold = common::PATIENCE;
        },
        |attach| {
            attach.service_uids = vec![me()];
            tune(attach);
        },
    )
}

fn lab(vms: u32, workers: usize) -> AttachDaemon {
    lab_with(vms, workers, |_| {})
}

fn ports(ports: &[u32]) -> Vec<Port> {
    ports.iter().copied().map(Port::new).collect()
}

fn ask(lab: &AttachDaemon, claims: &[u32]) -> Result<Serving, AttachError> {
    let request = ServiceRequest {
        name: None,
        ports: ports(claims),
    };
    Client::serve_within(&lab.path, &request, common::PATIENCE)
}

/// A service that has claimed these ports and listens on them.
pub(crate) fn service(lab: &AttachDaemon, claims: &[u32]) -> Service {
    let Serving {
        socket,
        sources,
        control,
    } = ask(lab, claims).unwrap();
    let config = DriverConfig {
        host_ports: Some(sources),
        ..DriverConfig::default()
    };
    let mut driver = Driver::attach_over(socket, config).unwrap();
    assert_eq!(driver.cid(), Cid::HOST);
    for &port in claims {
        driver.listen(Port::new(port), 8).unwrap();
    }
    Service { driver, control }
}

/// Connects from one driver to a port on which the other listens.
#[track_caller]
fn connect(one: &mut Driver, two: &mut Driver, to: Address) -> (StreamId, StreamId) {
    let stream = one.connect(to).unwrap();
    let mut accepted = None;
    all([one, two], "connected", |[one, two]| {
        accepted = accepted.or_else(|| two.accept(to.port));
        accepted.is_some() && one.state(stream) == Some(StreamState::Connected)
    });
    (stream, accepted.unwrap())
}

#[track_caller]
fn refused(driver: &mut Driver, to: Address) {
    let refused = driver.wait_connect(to, deadline());
    assert!(matches!(refused, Err(WaitError::Refused)), "{refused:?}");
}

/// Sends in both directions, to the end of the streams.
#[track_caller]
fn there_and_back(one: (&mut Driver, StreamId), two: (&mut Driver, StreamId), seed: u64) {
    let sent = bytes(seed, 1 << 20);
    let got = transfer((&mut *one.0, one.1), (&mut *two.0, two.1), &sent);
    assert_bytes(&got, &sent);
    let got = transfer(two, one, &sent[..99_999]);
    assert_bytes(&got, &sent[..99_999]);
}

#[test]
fn a_guest_has_two_services_and_the_hybrid_socket_at_once() {
    for workers in [1, 3] {
        let lab = lab(1, workers);
        let mut guest = lab.guest(0);
        let mut one = service(&lab, &[10, 11]);
        let mut two = service(&lab, &[20]);
        let path = format!("{}_30", lab.vms[0].uds_path.display());
        let program = UnixListener::bind(path).unwrap();
        // All three connections exist before any bytes are sent.
        let (a, at_one) = connect(&mut guest, &mut one.driver, host(11));
        let (b, at_two) = connect(&mut guest, &mut two.driver, host(20));
        let c = guest.wait_connect(host(30), deadline()).unwrap();
        let (mut socket, _) = program.accept().unwrap();
        for (driver, stream, port) in [(&one.driver, at_one, 11), (&two.driver, at_two, 20)] {
            let (local, peer) = driver.addresses(stream).unwrap();
            assert_eq!(local, host(port), "its own address is the host's");
            assert_eq!(peer.cid, guest.cid());
        }
        assert_eq!(
            one.driver.addresses(at_one).unwrap().1.port,
            guest.addresses(a).unwrap().0.port
        );
        there_and_back((&mut guest, a), (&mut one.driver, at_one), 1);
        there_and_back((&mut guest, b), (&mut two.driver, at_two), 2);
        let give_up = deadline();
        guest.wait_send(c, b"to the socket", give_up).unwrap();
        let mut got = [0; 13];
        socket.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"to the socket");
        assert_eq!(lab.stats().copied_bytes, 0, "one copy, by the receiver");
        // A process can connect to a service too.
        let mut process = lab.process("p");
        let (d, at_one) = connect(&mut process.driver, &mut one.driver, host(10));
        there_and_back((&mut process.driver, d), (&mut one.driver, at_one), 3);
        refused(&mut process.driver, host(12));
    }
}

#[test]
fn a_port_in_use_is_reported_as_in_use() {
    let lab = lab(1, 2);
    let mut guest = lab.guest(0);
    let mut one = service(&lab, &[10]);
    let before = lab.stats();
    assert_eq!((before.services, before.claimed_ports), (1, 1));
    // In the first request, also among free ports; and in a later one.
    let error = ask(&lab, &[9, 10, 11]).unwrap_err();
    assert!(
        matches!(error, AttachError::PortTaken(port) if port.get() == 10),
        "{error}"
    );
    assert_eq!(error.fault(), Fault::Caller);
    let mut two = service(&lab, &[]);
    let error = two.control.claim(&ports(&[12, 10])).unwrap_err();
    assert!(
        matches!(error, AttachError::PortTaken(port) if port.get() == 10),
        "{error}"
    );
    // The service's own port counts as taken too.
    let error = one.control.claim(&ports(&[10])).unwrap_err();
    assert!(matches!(error, AttachError::PortTaken(_)), "{error}");
    // A claim is granted as a whole or not at all: the other ports are free.
    refused(&mut guest, host(12));
    two.control.claim(&ports(&[9, 11, 12])).unwrap();
    assert_eq!(lab.stats().claimed_ports, 4);
    assert_eq!(lab.stats().attach_refused, before.attach_refused + 3);
    // The owner is not affected.
    connect(&mut guest, &mut one.driver, host(10));
}

#[test]
fn reserved_ports_and_too_many_are_refused() {
    let lab = lab_with(0, 1, |attach| attach.max_services = 2);
    let above = LAST_CLAIMABLE.get() + 1;
    for port in [above, 0x8000_0000, u32::MAX - 1] {
        let error = ask(&lab, &[5, port]).unwrap_err();
        assert!(
            matches!(error, AttachError::PortReserved(p) if p.get() == port),
            "{error}"
        );
    }
    let mut one = service(&lab, &[LAST_CLAIMABLE.get(), 0]);
    let error = one.control.claim(&ports(&[above])).unwrap_err();
    assert!(matches!(error, AttachError::PortReserved(_)), "{error}");
    let error = one.control.claim(&ports(&[u32::MAX])).unwrap_err();
    assert!(matches!(error, AttachError::Ports), "{error}");
    let more: Vec<u32> = (100..100 + MAX_CLAIMS as u32 - 1).collect();
    let error = one.control.claim(&ports(&more)).unwrap_err();
    assert!(matches!(error, AttachError::Full), "{error}");
    one.control.claim(&ports(&more[1..])).unwrap();
    let error = one.control.claim(&ports(&more[..1])).unwrap_err();
    assert!(matches!(error, AttachError::Full), "{error}");
    // The maximum of services; processes are counted separately.
    let two = service(&lab, &[]);
    let error = ask(&lab, &[7]).unwrap_err();
    assert!(matches!(error, AttachError::Full), "{error}");
    lab.process("db");
    drop(two);
    service(&lab, &[7]);
}

#[test]
fn strangers_and_processes_claim_nothing() {
    // Without configuration no process may be a service.
    let lab = AttachDaemon::new(1);
    let error = ask(&lab, &[10]).unwrap_err();
    assert!(matches!(error, AttachError::NotPermitted), "{error}");
    let mut process = lab.process("db");
    for claim in [Client::claim, Client::release] {
        let error = claim(&mut process.control, &ports(&[10])).unwrap_err();
        assert!(matches!(error, AttachError::BadRequest), "{error}");
    }
    assert_eq!(lab.stats().attached, 1, "its place is untouched");
    let mut guest = lab.guest(0);
    refused(&mut guest, host(10));
    // A user that may be a service may not attach for that reason.
    let lab = lab_with(0, 1, |attach| attach.allowed_uids = vec![4_000_000_001]);
    let error = lab.ask(&named("db")).unwrap_err();
    assert!(matches!(error, AttachError::NotPermitted), "{error}");
    service(&lab, &[10]);
}

/// Asks as another user, as the kernel reports it (SO_PEERCRED).
fn ask_as(uid: u32, lab: &AttachDaemon, claims: &[u32]) -> Result<Serving, AttachError> {
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let uid = rustix::process::Uid::from_raw(uid);
            // Credentials of this thread only.
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            ask(lab, claims)
        });
        asking.join().unwrap()
    })
}

#[test]
fn another_user_is_a_service_only_if_configured() {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        let reason = "only root can become another user";
        // Written directly, because the harness hides the output of a test that passes.
        let _ = writeln!(std::io::stdout(), "\nSKIPPED services' users: {reason}");
        return;
    }
    let open = |lab: &AttachDaemon| {
        for (path, mode) in [(lab.path.parent().unwrap(), 0o755), (&lab.path, 0o666)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    // The user may attach, and may not claim: the ports stay free.
    let lab_of_ours = lab_with(1, 2, |attach| attach.allowed_uids = vec![NOBODY]);
    open(&lab_of_ours);
    for claims in [&[10][..], &[], &[10, 11]] {
        let error = ask_as(NOBODY, &lab_of_ours, claims).unwrap_err();
        assert!(matches!(error, AttachError::NotPermitted), "{error}");
        assert_eq!(error.fault(), Fault::Caller);
    }
    assert_eq!(lab_of_ours.stats().claimed_ports, 0);
    refused(&mut lab_of_ours.guest(0), host(10));
    service(&lab_of_ours, &[10]);
    // The list names that user, and so not ours. The owner of a claim is recorded.
    let lab_of_his = lab_with(0, 1, |attach| attach.service_uids = vec![NOBODY]);
    open(&lab_of_his);
    let error = ask(&lab_of_his, &[10]).unwrap_err();
    assert!(matches!(error, AttachError::NotPermitted), "{error}");
    let _his = ask_as(NOBODY, &lab_of_his, &[10]).unwrap();
    let listed = lab_of_his.daemon().processes();
    assert_eq!(
        (listed[0].uid, &listed[0].claims[..]),
        (NOBODY, &ports(&[10])[..])
    );
}

#[test]
fn ports_change_hands_on_a_lease() {
    let lab = lab(1, 3);
    let mut guest = lab.guest(0);
    let path = format!("{}_10", lab.vms[0].uds_path.display());
    let program = UnixListener::bind(path).unwrap();
    let mut one = service(&lab, &[10]);
    let mut two = service(&lab, &[]);
    two.driver.listen(Port::new(10), 8).unwrap();
    for _ in 0..20 {
        let (stays, there) = connect(&mut guest, &mut one.driver, host(10));
        one.control.release(&ports(&[10])).unwrap();
        let error = one.control.release(&ports(&[10])).unwrap_err();
        assert!(
            matches!(error, AttachError::NotClaimed(port) if port.get() == 10),
            "{error}"
        );
        // Without a claim the connect goes to the hybrid socket.
        guest.wait_connect(host(10), deadline()).unwrap();
        program.accept().unwrap();
        two.control.claim(&ports(&[10])).unwrap();
        connect(&mut guest, &mut two.driver, host(10));
        // Existing connections stay.
        there_and_back((&mut guest, stays), (&mut one.driver, there), 4);
        two.control.release(&ports(&[10])).unwrap();
        one.control.claim(&ports(&[10])).unwrap();
    }
    let claimed: Vec<_> = lab.daemon().processes();
    let claimed: Vec<_> = claimed
        .iter()
        .map(|p| (p.pid as u32, &p.claims[..]))
        .collect();
    let us = std::process::id();
    assert_eq!(claimed, [(us, &[Port::new(10)][..]), (us, &[])]);
}

#[test]
fn a_service_that_dies_resets_what_it_had_and_leaves_its_ports() {
    for workers in [1, 3] {
        let lab = lab(1, workers);
        let mut guest = lab.guest(0);
        let mut other = service(&lab, &[20]);
        let (kept, there) = connect(&mut guest, &mut other.driver, host(20));
        for round in 0..6 {
            let mut dying = service(&lab, &[10, 11]);
            let (stream, _) = connect(&mut guest, &mut dying.driver, host(10));
            // Unread bytes in both directions.
            let _ = guest.send(stream, &[1; 30_000]);
            guest.drive().unwrap();
            match round % 3 {
                0 => drop(dying),
                1 => drop(dying.control),
                _ => drop(dying.driver),
            }
            eventually_with(&mut guest, "reset", |guest| {
                guest.state(stream) == Some(StreamState::Reset)
            });
            guest.close(stream);
            // Directly after it: the request waits until the ports are free.
            let mut next = service(&lab, &[11, 10]);
            let (stream, _) = connect(&mut guest, &mut next.driver, host(10));
            guest.close(stream);
        }
        eventually("all but one gone", || lab.stats().services == 1);
        assert_eq!(lab.stats().claimed_ports, 1);
        refused(&mut guest, host(10));
        there_and_back((&mut guest, kept), (&mut other.driver, there), 5);
        drop(other);
        eventually_with(&mut guest, "all connections gone", |_| {
            let stats = lab.stats();
            stats.conns_added == stats.conns_removed
        });
        assert_eq!(lab.stats().devices_lost, 0);
    }
}

#[test]
fn services_connect_out_and_replies_come_to_the_right_one() {
    for workers in [1, 3] {
        let lab = lab(2, workers);
        let mut guest = lab.guest(0);
        guest.listen(PORT, 64).unwrap();
        let mut one = service(&lab, &[10]);
        let mut two = service(&lab, &[20]);
        let to = at(guest.cid());
        let mut sources = Vec::new();
        let mut pairs = Vec::new();
        for round in 0..8 {
            let service = if round % 2 == 0 { &mut one } else { &mut two };
            let (out, there) = connect(&mut service.driver, &mut guest, to);
            let source = guest.addresses(there).unwrap().1;
            assert_eq!(source.cid, Cid::HOST);
            assert_eq!(source, service.driver.addresses(out).unwrap().0);
            sources.push(source.port);
            pairs.push((out, there));
        }
        // The host's own side has source ports of its own too.
        let uds_path = &lab.vms[0].uds_path;
        let program = std::thread::scope(|scope| {
            let program = scope.spawn(|| connect_guest(uds_path, PORT.get()).unwrap());
            let mut accepted = None;
            eventually_with(&mut guest, "accepted", |guest| {
                accepted = accepted.or_else(|| guest.accept(PORT));
                accepted.is_some() && program.is_finished()
            });
            sources.push(guest.addresses(accepted.unwrap()).unwrap().1.port);
            program.join().unwrap()
        });
        sources.sort_unstable();
        sources.dedup();
        assert_eq!(sources.len(), 9, "no two have the same");
        for (round, (out, there)) in pairs.into_iter().enumerate() {
            let service = if round % 2 == 0 { &mut one } else { &mut two };
            there_and_back(
                (&mut service.driver, out),
                (&mut guest, there),
                10 + round as u64,
            );
        }
        drop(program);
        // A service may connect from a port that it has claimed, and from no port of another owner.
        for port in [20, 21, 0x4000_0000, 0xfffe_ffff] {
            let out = one.driver.connect_from(Port::new(port), to).unwrap();
            eventually_with(&mut one.driver, "refused", |driver| {
                driver.state(out) == Some(StreamState::Reset)
            });
        }
        two.driver.unlisten(Port::new(20));
        let out = two.driver.connect_from(Port::new(20), to).unwrap();
        let mut accepted = None;
        all([&mut two.driver, &mut guest], "accepted", |[two, guest]| {
            accepted = accepted.or_else(|| guest.accept(PORT));
            accepted.is_some() && two.state(out) == Some(StreamState::Connected)
        });
        let source = guest.addresses(accepted.unwrap()).unwrap().1;
        assert_eq!(source, host(20));
        there_and_back((&mut two.driver, out), (&mut guest, accepted.unwrap()), 30);
        // The host cannot connect to itself.
        refused(&mut one.driver, host(20));
    }
}

#[test]
fn an_endpoint_is_a_service_with_messages_and_several_pairs() {
    use zerosock::vsock::Endpoint;
    for pairs in [1, 3] {
        let lab = AttachDaemon::with(
            1,
            |config| {
                config.workers = 3;
                config.queue_pairs = pairs;
            },
            |attach| attach.service_uids = vec![me()],
        );
        let port = Port::new(9);
        let service = Endpoint::builder().name("records").ports([port]);
        let service = service.attach_as_host(&lab.path).unwrap();
        assert!(service.is_service() && service.cid() == Cid::HOST);
        let guest = Endpoint::builder()
            .attach_device(&lab.vms[0].socket)
            .unwrap();
        let listener = service.listen_seqpacket(port, 8).unwrap();
        let back = guest.listen_seqpacket(PORT, 8).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..8u8 {
                    let (record, peer) = listener.accept_timeout(common::PATIENCE).unwrap();
                    assert_eq!(peer.cid, guest.cid());
                    let mut message = [0; 8];
                    let got = record.recv(&mut message).unwrap().unwrap();
                    assert_eq!(&message[..got.len], [n; 3]);
                    // The service connects back, from its block or from its claimed port.
                    let out = service.connect_seqpacket(at(guest.cid())).unwrap();
                    out.send(&[n; 5]).unwrap();
                    assert!(out.recv(&mut message).unwrap().is_none(), "the end");
                }
            });
            for n in 0..8u8 {
                let record = guest.connect_seqpacket(host(9)).unwrap();
                record.send(&[n; 3]).unwrap();
                let (called, peer) = back.accept_timeout(common::PATIENCE).unwrap();
                assert_eq!(peer.cid, Cid::HOST);
                let mut message = [0; 8];
                let got = called.recv(&mut message).unwrap().unwrap();
                assert_eq!(&message[..got.len], [n; 5]);
            }
        });
        let listed = lab.daemon().processes();
        assert_eq!(listed[0].claims, [port]);
        assert_eq!(listed[0].name.as_ref().unwrap().as_str(), "records");
        assert_eq!(
            lab.daemon().resolve(&"records".parse().unwrap()),
            Some(Cid::HOST)
        );
        // It can listen only on ports that it has claimed and not released.
        for port in [Port::new(10), Port::ANY] {
            let error = service.listen(port, 1).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        }
        drop(listener);
        service.release(port).unwrap();
        assert!(service.listen(port, 1).is_err());
        let error = guest.connect_seqpacket(host(9)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    }
}
