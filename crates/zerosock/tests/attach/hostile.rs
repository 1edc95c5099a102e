//! Malformed, forbidden and missing requests cost only the process that sends them.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

use super::*;
use crate::common::driver::{self, FrontendError};
use crate::common::{self, bytes, eventually};
use zerosock::attach::codec::{
    Answer, MAX_REQUEST, Request, VERSION, decode_answer, encode_request,
};
use zerosock::attach::{ServiceRequest, Status, Version};
use zerosock::vsock::Fault;
use zerosock_sys::fd_passing;

/// A client that sends arbitrary bytes.
struct Raw(OwnedFd);

impl Raw {
    fn new(lab: &AttachDaemon) -> Raw {
        let kind = SocketType::SEQPACKET;
        let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(&lab.path).unwrap()).unwrap();
        Raw(socket)
    }

    fn say(&self, bytes: &[u8]) {
        send(&self.0, bytes, SendFlags::NOSIGNAL).unwrap();
    }

    /// The next answer; `None`: the server has closed.
    #[track_caller]
    fn hear(&self) -> Option<Answer> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let patience = Timespec {
            tv_sec: common::PATIENCE.as_secs() as i64,
            tv_nsec: 0,
        };
        assert_eq!(poll(&mut fds, Some(&patience)), Ok(1), "no answer");
        let mut bytes = [0u8; 100];
        match recv(&self.0, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((len, _)) if len > 0 => Some(decode_answer(&bytes[..len]).unwrap()),
            Ok(_) | Err(rustix::io::Errno::CONNRESET) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// The answer must have this status, and the server must then close.
    #[track_caller]
    fn refused(&self, status: Status) -> Answer {
        let answer = self.hear().unwrap();
        assert_eq!(answer.status, status);
        assert_eq!(self.hear(), None);
        answer
    }
}

fn request(name: &str) -> Vec<u8> {
    encode_request(&Request::Attach(named(name))).unwrap()
}

fn refused(lab: &AttachDaemon, request: &AttachRequest) -> AttachError {
    let before = lab.stats().attach_refused;
    let error = lab.ask(request).unwrap_err();
    assert_eq!(lab.stats().attach_refused, before + 1);
    error
}

#[test]
fn a_cid_or_name_in_use_is_refused() {
    let lab = AttachDaemon::new(1);
    let owner = AttachRequest {
        cid: Some(Cid::new(700)),
        ..named("db")
    };
    let mut owner = lab.process_with(&owner);
    // A VM's CID, running or not; a process's CID.
    for cid in [3, 700] {
        let error = refused(&lab, &numbered(cid));
        assert!(
            matches!(error, AttachError::CidTaken(Some(taken)) if taken.get() == cid),
            "{error}"
        );
        assert_eq!(error.fault(), Fault::Caller);
    }
    let error = refused(&lab, &named("db"));
    let AttachError::NameTaken(Some(name)) = &error else {
        panic!("{error}");
    };
    assert_eq!(name.as_str(), "db");
    assert_eq!(error.fault(), Fault::Caller);
    assert_eq!(error.to_string(), "the name db is taken");
    // The owner is not affected, and a valid request is still granted.
    owner.driver.listen(PORT, 8).unwrap();
    let mut other = lab.process("other");
    connected(&mut other.driver, &mut owner.driver);
    assert_eq!(lab.stats().attached, 2);
}

#[test]
fn processes_above_the_maximum_are_refused() {
    let lab = AttachDaemon::with(0, |_| {}, |attach| attach.max_processes = 2);
    let one = lab.process("one");
    let _two = lab.process("two");
    let error = refused(&lab, &named("three"));
    assert!(matches!(error, AttachError::Full), "{error}");
    assert_eq!(error.fault(), Fault::System);
    drop(one);
    eventually("room", || lab.stats().attached == 1);
    lab.process("three");
}

#[test]
fn a_user_that_may_not_attach_is_refused_before_its_request_is_read() {
    let lab = AttachDaemon::with(
        0,
        |_| {},
        |attach| attach.allowed_uids = vec![4_000_000_001],
    );
    for _ in 0..20 {
        let error = refused(&lab, &named("db"));
        assert!(matches!(error, AttachError::NotPermitted), "{error}");
        assert_eq!(error.fault(), Fault::Caller);
        Raw::new(&lab).refused(Status::NotPermitted);
    }
    assert_eq!(lab.stats().attached, 0);
}

#[test]
fn an_answer_to_another_major_version_has_both_versions() {
    let lab = AttachDaemon::new(0);
    for major in [0u16, 2, 0x100, u16::MAX] {
        let raw = Raw::new(&lab);
        let mut bytes = request("db");
        bytes[4..6].copy_from_slice(&major.to_le_bytes());
        raw.say(&bytes);
        let answer = raw.refused(Status::VersionMismatch);
        assert_eq!(answer.version, VERSION);
        let minor = VERSION.minor;
        assert_eq!(answer.asked, Version { major, minor });
    }
    lab.process("db");
}

#[test]
fn half_a_message_and_rubbish_are_refused() {
    let lab = AttachDaemon::new(0);
    let good = request("db");
    let mut cases: Vec<Vec<u8>> = (1..good.len()).map(|len| good[..len].to_vec()).collect();
    cases.push(bytes(1, 88));
    cases.push(vec![0; MAX_REQUEST]);
    // Longer than any request: the server reads a part.
    let mut long = good.clone();
    long.resize(4 * MAX_REQUEST, 0);
    cases.push(long);
    // Only an attached process may resolve a name.
    let resolve = Request::Resolve("db".parse().unwrap());
    cases.push(encode_request(&resolve).unwrap());
    for case in cases {
        let raw = Raw::new(&lab);
        raw.say(&case);
        raw.refused(Status::BadRequest);
    }
    // A descriptor, which no request has.
    let raw = Raw::new(&lab);
    match fd_passing::send(&raw.0, &[IoSlice::new(&good)], &[raw.0.as_fd()]) {
        Ok(_) => {
            raw.refused(Status::BadRequest);
        }
        // The kernel refuses it already (SO_PASSRIGHTS, Linux 6.16).
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied),
    }
    // Two requests at once: the second is out of turn, whatever the first answer is.
    let raw = Raw::new(&lab);
    raw.say(&good);
    let _ = send(&raw.0, &good, SendFlags::NOSIGNAL);
    drop(raw);
    eventually("nobody attached", || lab.stats().attached == 0);
    lab.process("db");
}

#[test]
fn a_lease_survives_a_bad_question_but_gives_nothing_more() {
    let lab = AttachDaemon::new(0);
    let raw = Raw::new(&lab);
    raw.say(&request("db"));
    assert_eq!(raw.hear().unwrap().status, Status::Ok);
    // The descriptor was not taken out of the message, so the front-end's end is closed.
    assert_eq!(raw.hear(), None);

    let attached = lab.ask(&named("db")).unwrap();
    let say = |bytes: &[u8]| send(&attached.control, bytes, SendFlags::NOSIGNAL).unwrap();
    let mut control = attached
        .control
        .as_fd()
        .try_clone_to_owned()
        .map(Raw)
        .unwrap();
    for bad in [&b"rubbish"[..], &request("again")] {
        say(bad);
        assert_eq!(control.hear().unwrap().status, Status::BadRequest);
    }
    // Many requests without reading an answer: the server does not make other processes wait.
    let question = encode_request(&Request::Resolve("db".parse().unwrap())).unwrap();
    let mut asked = 0;
    while asked < 100_000 && send(&control.0, &question, SendFlags::DONTWAIT).is_ok() {
        asked += 1;
    }
    lab.process("other");
    for _ in 0..asked {
        assert_eq!(control.hear().unwrap().cid, attached.cid);
    }
    control = Raw(attached.control.as_fd().try_clone_to_owned().unwrap());
    assert!(!hung_up(&control.0));
}

/// A lab in which the test's own user may run services.
fn services() -> AttachDaemon {
    let us = rustix::process::geteuid().as_raw();
    AttachDaemon::with(1, |_| {}, |attach| attach.service_uids = vec![us])
}

fn claim(op: fn(Vec<Port>) -> Request, ports: &[u32]) -> Vec<u8> {
    let ports = ports.iter().copied().map(Port::new).collect();
    encode_request(&op(ports)).unwrap()
}

#[test]
fn claims_are_refused_before_attaching_and_from_processes() {
    let lab = services();
    // Not as the first request, and not malformed.
    for op in [Request::Claim, Request::Release] {
        let raw = Raw::new(&lab);
        raw.say(&claim(op, &[5]));
        raw.refused(Status::BadRequest);
    }
    let serve = encode_request(&Request::Serve(ServiceRequest {
        name: None,
        ports: vec![Port::new(5)],
    }))
    .unwrap();
    for len in 1..serve.len() {
        let raw = Raw::new(&lab);
        raw.say(&serve[..len]);
        raw.refused(Status::BadRequest);
    }
    // A second request before the first answer: the service is refused, and its ports are free.
    let raw = Raw::new(&lab);
    raw.say(&serve);
    let _ = send(&raw.0, &claim(Request::Claim, &[6]), SendFlags::NOSIGNAL);
    drop(raw);
    eventually("no service", || lab.stats().services == 0);
    let raw = Raw::new(&lab);
    raw.say(&serve);
    assert_eq!(raw.hear().unwrap().status, Status::Ok);
}

#[test]
fn a_flood_of_claims_is_answered_in_order_without_delaying_others() {
    let lab = services();
    let serving = Client::serve(&lab.path, &ServiceRequest::default()).unwrap();
    let lease = Raw(serving.control.as_fd().try_clone_to_owned().unwrap());
    // No answer is read. Each request waits for the workers; errors keep their place in the order.
    let words = [
        (claim(Request::Claim, &[5, 6]), Status::Ok),
        (claim(Request::Claim, &[6, 7]), Status::PortTaken),
        (claim(Request::Release, &[7]), Status::NotClaimed),
        (b"rubbish".to_vec(), Status::BadRequest),
        (claim(Request::Claim, &[0x4000_0000]), Status::PortReserved),
        (request("again"), Status::BadRequest),
        (claim(Request::Release, &[6, 5]), Status::Ok),
    ];
    let mut said = 0;
    for (word, _) in words.iter().cycle() {
        if said >= 50_000 || send(&lease.0, word, SendFlags::DONTWAIT).is_err() {
            break;
        }
        said += 1;
    }
    lab.process("other");
    for (_, status) in words.iter().cycle().take(said) {
        assert_eq!(lease.hear().unwrap().status, *status);
    }
    // A client that closes in the middle leaves nothing behind.
    for (word, _) in words.iter().cycle().take(8) {
        let _ = send(&lease.0, word, SendFlags::DONTWAIT);
    }
    drop((lease, serving));
    eventually("no service", || {
        let stats = lab.stats();
        (stats.services, stats.claimed_ports) == (0, 0)
    });
    let request = ServiceRequest {
        name: None,
        ports: vec![Port::new(5), Port::new(6)],
    };
    Client::serve(&lab.path, &request).unwrap();
}

#[test]
fn a_process_that_sends_nothing_delays_no_other_and_is_dropped() {
    let lab = AttachDaemon::new(0);
    let silent = Raw::new(&lab);
    let start = Instant::now();
    lab.process("db");
    assert_eq!(silent.hear(), None);
    assert!(
        start.elapsed() >= Duration::from_secs(4),
        "dropped too soon"
    );
}

#[test]
fn a_flood_of_clients_is_bounded() {
    let lab = AttachDaemon::new(1);
    let mut attached = lab.process("before");
    let mut guest = lab.guest(0);
    attached.driver.listen(PORT, 8).unwrap();
    let flood: Vec<Raw> = (0..100).map(|_| Raw::new(&lab)).collect();
    let refused = |raw: &&Raw| {
        let mut fds = [PollFd::new(&raw.0, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    };
    eventually("the rest turned away", || {
        flood.iter().filter(refused).count() >= 36
    });
    assert_eq!(lab.stats().attach_refused, 36);
    flood.last().unwrap().refused(Status::Full);
    let error = lab.ask(&named("late")).unwrap_err();
    assert!(matches!(error, AttachError::Full), "{error}");
    // Attached processes continue.
    connected(&mut guest, &mut attached.driver);
    drop(flood);
    eventually("let in again", || lab.ask(&named("late")).is_ok());
}

#[test]
fn memory_that_can_shrink_is_refused_to_processes() {
    let lab = AttachDaemon::new(1);
    let attached = lab.ask(&named("db")).unwrap();
    let config = DriverConfig {
        seal: false,
        ..DriverConfig::default()
    };
    let error = Driver::attach_over(attached.socket, config).unwrap_err();
    let driver::DriverAttachError::Frontend(FrontendError::Refused { request, status }) = error
    else {
        panic!("{error}");
    };
    assert_eq!((request.as_str(), status), ("SET_MEM_TABLE", 1));
    assert_eq!(lab.stats().control_faults, 1);
    // A VM's memory is accepted without a seal.
    let config = DriverConfig {
        seal: false,
        ..DriverConfig::new(&lab.vms[0].socket)
    };
    Driver::attach(config).unwrap();
    assert_eq!(lab.stats().control_faults, 1);
}

/// The process may have exited and left its own end in an unread request. Takes ten seconds.
#[test]
fn a_process_that_takes_no_answer_does_not_keep_its_place() {
    let lab = AttachDaemon::new(0);
    let raw = Raw::new(&lab);
    raw.say(&request("db"));
    assert_eq!(raw.hear().unwrap().status, Status::Ok);
    let resolve = encode_request(&Request::Resolve("db".parse().unwrap())).unwrap();
    eventually("it was given up", || {
        while send(&raw.0, &resolve, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok() {}
        lab.stats().attached == 0
    });
    lab.process("db");
}
