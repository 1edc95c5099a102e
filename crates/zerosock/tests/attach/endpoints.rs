//! The API of endpoints that are attached to a daemon.

use std::io::{ErrorKind, Read, Write};
use std::thread;

use zerosock::vsock::{Endpoint, OpenError};

use super::*;
use crate::common;

fn open(lab: &AttachDaemon, name: &str) -> Endpoint {
    Endpoint::builder().name(name).attach(&lab.path).unwrap()
}

#[test]
fn a_name_is_found_and_its_bytes_are_copied_once() {
    const LEN: usize = 1 << 20;
    // A slow machine must not look like a stalled receiver: its bytes would be copied.
    let lab = AttachDaemon::with(0, |config| config.hold = common::PATIENCE, |_| {});
    let db = open(&lab, "db");
    let web = open(&lab, "web");
    let listener = db.listen(PORT, 4).unwrap();
    assert_eq!(web.resolve("db").unwrap(), db.cid());
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, peer) = listener.accept_timeout(common::PATIENCE).unwrap();
            assert_eq!(peer.cid, web.cid());
            let mut got = Vec::new();
            stream.read_to_end(&mut got).unwrap();
            assert_eq!(got, common::bytes(1, LEN));
        });
        let mut stream = web.connect_name("db", PORT).unwrap();
        stream.write_all(&common::bytes(1, LEN)).unwrap();
    });
    let stats = lab.stats();
    assert_eq!(
        stats.copied_bytes, 0,
        "none but the one from buffer to buffer"
    );
    assert_eq!(stats.in_place_bytes, LEN as u64);
}

#[test]
fn names_that_are_taken_unknown_or_impossible() {
    let lab = AttachDaemon::new(0);
    let db = open(&lab, "db");
    let error = Endpoint::builder().name("db").attach(&lab.path);
    let Err(OpenError::Place(error)) = error else {
        panic!("{error:?}");
    };
    assert!(matches!(error, AttachError::NameTaken(_)));
    assert_eq!(error.fault(), zerosock::vsock::Fault::Caller);
    let error = Endpoint::builder().name("no spaces").attach(&lab.path);
    assert!(matches!(error, Err(OpenError::Name(_))));
    assert_eq!(
        db.resolve("nobody").unwrap_err().kind(),
        ErrorKind::NotFound
    );
    assert_eq!(db.resolve("?").unwrap_err().kind(), ErrorKind::InvalidInput);
    let web = Endpoint::attach(&lab.path).unwrap();
    drop(db);
    let give_up = deadline();
    while web.resolve("db").is_ok() {
        assert!(Instant::now() < give_up, "the name stays taken");
    }
    let again = open(&lab, "db");
    assert_eq!(web.resolve("db").unwrap(), again.cid());
}

#[test]
fn a_reserved_cid_is_an_error_of_the_caller() {
    let lab = AttachDaemon::new(0);
    for cid in [0, 1, 2, Cid::ANY.get()] {
        let error = Endpoint::builder().cid(Cid::new(cid)).attach(&lab.path);
        let error = error.unwrap_err();
        assert_eq!(error.fault(), zerosock::vsock::Fault::Caller, "{error}");
        let named = error
            .to_string()
            .contains(&format!("CID {cid} is reserved"));
        assert!(named, "{error}");
        assert_eq!(std::io::Error::from(error).kind(), ErrorKind::InvalidInput);
    }
}

#[test]
fn calls_on_an_endpoint_fail_after_its_daemon_has_ended() {
    let mut lab = AttachDaemon::new(0);
    let db = open(&lab, "db");
    let web = open(&lab, "web");
    let listener = db.listen(PORT, 4).unwrap();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept_timeout(common::PATIENCE).unwrap().0);
        let mut stream = web.connect_name("db", PORT).unwrap();
        let mut other = accepting.join().unwrap();
        lab.daemon.take().unwrap().shutdown();
        let mut byte = [0];
        for stream in [&mut stream, &mut other] {
            match stream.read(&mut byte) {
                Ok(0) => {}
                Ok(_) => panic!("a byte out of nowhere"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
            }
        }
    });
    // The first call detects it at the latest.
    let there = Address::new(db.cid(), PORT);
    web.connect(there).unwrap_err();
    let error = web.connect(there).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::HostUnreachable);
    assert!(web.resolve("db").is_err());
}
