//! The attach client against servers that break the protocol.

use std::io::IoSlice;
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, accept};

use super::*;
use zerosock::attach::codec::{Answer, SHORT_ANSWER_LEN, VERSION, encode_answer};
use zerosock::attach::{AttachedDevice, Status, Version};
use zerosock::vsock::{Endpoint, Fault, OpenError};
use zerosock_sys::fd_passing;

/// Sends a request to a server that answers with these bytes and descriptors, or closes if there
/// are none.
fn ask(bytes: &[u8], fds: &[OwnedFd]) -> Result<Attached, AttachError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let listener = attach::listen(&path).unwrap();
    rustix::io::ioctl_fionbio(&listener, false).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let client = accept(&listener).unwrap();
            if !bytes.is_empty() {
                let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
                fd_passing::send(&client, &[IoSlice::new(bytes)], &fds).unwrap();
            }
            // Closed with the request unread.
        });
        Client::connect(&path, &numbered(9))
    })
}

fn answer(change: impl FnOnce(&mut Answer)) -> Vec<u8> {
    let mut answer = Answer {
        cid: Cid::new(9),
        host: Cid::HOST,
        ..Answer::refusal(Status::Ok, VERSION)
    };
    change(&mut answer);
    encode_answer(&answer).to_vec()
}

fn stream() -> OwnedFd {
    UnixStream::pair().unwrap().0.into()
}

fn protocol_error(result: Result<Attached, AttachError>) {
    let error = result.unwrap_err();
    assert!(matches!(error, AttachError::Protocol(_)), "{error}");
    assert_eq!(error.fault(), Fault::Peer);
}

#[test]
fn a_good_answer_is_taken() {
    let attached = ask(&answer(|_| {}), &[stream()]).unwrap();
    assert_eq!(attached.cid, Cid::new(9));
    // An answer of a later minor version, with unknown bytes at its end.
    let mut longer = answer(|answer| answer.version.minor = 5);
    longer.extend([1; 8]);
    ask(&longer, &[stream()]).unwrap();
}

#[test]
fn a_server_that_breaks_the_protocol_is_to_blame() {
    let good = answer(|_| {});
    let memory = zerosock_sys::memfd::create("no socket", 4096, false).unwrap();
    protocol_error(ask(&good, &[]));
    protocol_error(ask(&good, &[stream(), stream()]));
    protocol_error(ask(&good, &[memory]));
    protocol_error(ask(&answer(|a| a.cid = Cid::new(10)), &[stream()]));
    protocol_error(ask(&answer(|a| a.cid = Cid::HOST), &[stream()]));
    protocol_error(ask(&answer(|a| a.status = Status::UnknownName), &[]));
    protocol_error(ask(b"HTTP/1.1 400 Bad Request", &[]));
    for len in 1..SHORT_ANSWER_LEN {
        protocol_error(ask(&good[..len], &[stream()]));
    }
    let error = ask(&[], &[]).unwrap_err();
    assert!(matches!(error, AttachError::Closed), "{error}");
    assert_eq!(error.fault(), Fault::Peer);
}

/// As `ask`, for a program that takes memory of 4 MiB. The server has each of these answers for one connection.
fn ask_for_memory(answers: &[(Vec<u8>, &[OwnedFd])]) -> Result<AttachedDevice, AttachError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let listener = attach::listen(&path).unwrap();
    rustix::io::ioctl_fionbio(&listener, false).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (bytes, fds) in answers {
                let client = accept(&listener).unwrap();
                let mut request = [0; 4096];
                rustix::net::recv(&client, &mut request, RecvFlags::empty()).unwrap();
                let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
                fd_passing::send(&client, &[IoSlice::new(bytes)], &fds).unwrap();
            }
        });
        let attached = Client::connect_for_memory(&path, &numbered(9), WANTED, common::PATIENCE);
        attached.map(|(device, _)| device)
    })
}

const WANTED: u64 = 4 << 20;

fn memory_answer(change: impl FnOnce(&mut Answer)) -> Vec<u8> {
    answer(|answer| {
        answer.memory = WANTED;
        answer.features = 1 << 32;
        change(answer);
    })
}

fn memory(len: u64, seal: bool) -> OwnedFd {
    zerosock_sys::memfd::create("memory", len, seal).unwrap()
}

#[test]
fn memory_and_doorbell_are_taken() {
    let fds = [memory(WANTED, true), stream()];
    let device = ask_for_memory(&[(memory_answer(|_| {}), &fds)]).unwrap();
    let AttachedDevice::Memory(device) = device else {
        panic!("{device:?}");
    };
    assert_eq!((device.features, device.cid), (1 << 32, Cid::new(9)));
    // More than was requested.
    let longer = memory_answer(|answer| answer.memory = 2 * WANTED);
    let fds = [memory(2 * WANTED, true), stream()];
    ask_for_memory(&[(longer, &fds)]).unwrap();
    // A host has a vhost-user connection.
    let device = ask_for_memory(&[(answer(|_| {}), &[stream()])]).unwrap();
    assert!(matches!(device, AttachedDevice::VhostUser(_)));
}

#[test]
fn a_server_without_memory_is_asked_again_in_the_way_of_its_version() {
    for minor in [0, 1] {
        let refused = answer(|answer| {
            answer.status = Status::BadRequest;
            answer.version.minor = minor;
        });
        let granted = answer(|answer| answer.version.minor = minor);
        let answers = [(refused.clone(), [].as_slice()), (granted, &[stream()])];
        let device = ask_for_memory(&answers).unwrap();
        assert!(matches!(device, AttachedDevice::VhostUser(_)));
        // Once.
        let error = ask_for_memory(&[(refused.clone(), &[]), (refused, &[])]).unwrap_err();
        assert!(matches!(error, AttachError::BadRequest), "{error}");
    }
    let refused = answer(|answer| answer.status = Status::BadRequest);
    let error = ask_for_memory(&[(refused, &[])]).unwrap_err();
    assert!(matches!(error, AttachError::BadRequest), "{error}");
}

#[test]
fn bad_memory_is_refused_by_name() {
    let refused = |what: &str, bytes: Vec<u8>, fds: &[OwnedFd]| {
        let error = ask_for_memory(&[(bytes, fds)]).unwrap_err();
        assert!(matches!(error, AttachError::Protocol(_)), "{error}");
        assert_eq!(error.fault(), Fault::Peer);
        assert!(error.to_string().contains(what), "{error}");
    };
    let good = || memory_answer(|_| {});
    let all = "exactly a memory and a doorbell";
    refused(all, good(), &[]);
    refused(all, good(), &[memory(WANTED, true)]);
    refused(all, good(), &[memory(WANTED, true), stream(), stream()]);
    refused("can shrink", good(), &[memory(WANTED, false), stream()]);
    refused("not a file in memory", good(), &[stream(), stream()]);
    let disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    disk.set_len(WANTED).unwrap();
    refused("not a file in memory", good(), &[disk.into(), stream()]);
    let shorter = [memory(WANTED / 2, true), stream()];
    refused("another length", good(), &shorter);
    let honest = memory_answer(|answer| answer.memory = WANTED / 2);
    refused("shorter", honest, &shorter);
    let no_doorbell = [memory(WANTED, true), memory(WANTED, true)];
    refused("not a stream socket", good(), &no_doorbell);
    let fds = [memory(WANTED, true), stream()];
    let other = memory_answer(|answer| answer.cid = Cid::new(10));
    refused("CID", other, &fds);
    // A socket and no memory, and memory for a program that does not take it.
    refused("exactly one", answer(|_| {}), &fds);
    protocol_error(ask(&good(), &fds));
}

#[test]
fn a_server_of_memory_is_named_to_programs_that_do_not_take_it() {
    let only = encode_answer(&Answer::memory_only(VERSION)).to_vec();
    let error = ask(&only, &[]).unwrap_err();
    assert!(matches!(error, AttachError::MemoryOnly), "{error}");
    assert_eq!(error.fault(), Fault::Caller);
    let kind = std::io::Error::from(OpenError::from(error)).kind();
    assert_eq!(kind, std::io::ErrorKind::Unsupported);
}

#[test]
fn a_server_of_another_version_is_named() {
    let version = Version { major: 3, minor: 1 };
    let other = answer(|answer| {
        answer.status = Status::VersionMismatch;
        answer.version = version;
    });
    let error = ask(&other, &[]).unwrap_err();
    let AttachError::VersionMismatch { ours, server } = &error else {
        panic!("{error}");
    };
    assert_eq!((*ours, *server), (VERSION.into(), version.into()));
    assert_eq!(error.fault(), Fault::Peer);
    assert!(error.to_string().contains("3.1"), "{error}");
    let opening = OpenError::from(error);
    assert_eq!(opening.fault(), Fault::Peer);
    let kind = std::io::Error::from(opening).kind();
    assert_eq!(kind, std::io::ErrorKind::Unsupported);
}

#[test]
fn a_server_that_does_not_answer_times_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let _listener = attach::listen(&path).unwrap();
    let short = Duration::from_millis(50);
    let error = Client::connect_within(&path, &numbered(9), short).unwrap_err();
    assert!(matches!(error, AttachError::TimedOut { .. }), "{error}");
    let nowhere = dir.path().join("nowhere");
    let error = Client::connect(&nowhere, &numbered(9)).unwrap_err();
    assert!(matches!(error, AttachError::Connect { .. }), "{error}");
    assert_eq!(error.fault(), Fault::System);
}

/// Attaches an endpoint within 50 ms, and checks the error and that it names the right cause.
fn assert_times_out(path: &std::path::Path, names: &str) {
    let builder = Endpoint::builder().attach_timeout(Duration::from_millis(50));
    let error = builder.attach(path).unwrap_err();
    assert_eq!(error.fault(), Fault::Peer);
    let text = error.to_string();
    assert!(text.contains(names), "{text}");
    let kind = std::io::Error::from(error).kind();
    assert_eq!(kind, std::io::ErrorKind::TimedOut);
}

#[test]
fn attaching_to_a_server_that_accepts_and_never_answers_times_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let listener = attach::listen(&path).unwrap();
    rustix::io::ioctl_fionbio(&listener, false).unwrap();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| accept(&listener).unwrap());
        assert_times_out(&path, path.to_str().unwrap());
        accepted.join().unwrap();
    });
}

#[test]
fn attaching_to_a_device_that_never_answers_times_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let listener = attach::listen(&path).unwrap();
    rustix::io::ioctl_fionbio(&listener, false).unwrap();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let client = accept(&listener).unwrap();
            let (ours, theirs) = UnixStream::pair().unwrap();
            let answer = answer(|_| {});
            let fds = [theirs.as_fd()];
            fd_passing::send(&client, &[IoSlice::new(&answer)], &fds).unwrap();
            (client, ours)
        });
        assert_times_out(&path, "GET_FEATURES");
        server.join().unwrap();
    });
}

#[test]
fn a_late_answer_is_not_taken_for_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let listener = attach::listen(&path).unwrap();
    rustix::io::ioctl_fionbio(&listener, false).unwrap();
    let (go_on, late) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let client = accept(&listener).unwrap();
            // The answer has the request's number; the second answer arrives too late.
            for cid in 9.. {
                let mut request = [0; 4096];
                match rustix::net::recv(&client, &mut request, RecvFlags::empty()) {
                    Ok((bytes, _)) if bytes > 0 => {}
                    _ => break,
                }
                if cid == 10 {
                    late.recv().unwrap();
                }
                let answer = answer(|answer| answer.cid = Cid::new(cid));
                let fds = [stream()];
                let fds = fds.iter().map(|fd| fd.as_fd()).filter(|_| cid == 9);
                let fds: Vec<_> = fds.collect();
                fd_passing::send(&client, &[IoSlice::new(&answer)], &fds).unwrap();
            }
        });
        let short = Duration::from_secs(1);
        let mut client = Client::connect_within(&path, &numbered(9), short)
            .unwrap()
            .control;
        let name = "somebody".parse().unwrap();
        let error = client.resolve(&name).unwrap_err();
        assert!(matches!(error, AttachError::TimedOut { .. }), "{error}");
        go_on.send(()).unwrap();
        let mut answered = 0;
        for cid in 11.. {
            match client.resolve(&name) {
                Ok(answer) => {
                    assert_eq!(answer, Cid::new(cid));
                    answered += 1;
                }
                // A busy machine may be late as well.
                Err(error) => assert!(matches!(error, AttachError::TimedOut { .. }), "{error}"),
            }
            if answered == 3 {
                break;
            }
        }
    });
}
