//! The front-end against devices that send replies in parts, malformed replies, or none.

use super::*;
use std::io::{Read, Write};

fn pair(timeout: Duration) -> (Frontend, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Frontend::from_stream(ours, timeout).unwrap(), theirs)
}

fn reply(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [code, flags, payload.len() as u32] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.extend_from_slice(payload);
    bytes
}

#[test]
fn a_reply_sent_byte_by_byte_is_reassembled() {
    let (mut frontend, mut device) = pair(Duration::from_secs(20));
    let writer = std::thread::spawn(move || {
        let mut request = [0u8; HEADER_LEN];
        device.read_exact(&mut request).unwrap();
        assert_eq!(ne_u32(&request, 0), FrontendReq::GET_FEATURES as u32);
        for byte in reply(1, VERSION | FLAG_REPLY, &0x1234u64.to_ne_bytes()) {
            device.write_all(&[byte]).unwrap();
        }
    });
    assert_eq!(frontend.get_features().unwrap(), 0x1234);
    writer.join().unwrap();
}

#[test]
fn a_silent_device_times_out() {
    let (mut frontend, _device) = pair(Duration::from_millis(10));
    assert!(matches!(
        frontend.get_features(),
        Err(FrontendError::TimedOut { request }) if request == "GET_FEATURES"
    ));
}

#[test]
fn a_deadline_ends_calls_before_their_time_out() {
    let (mut frontend, mut device) = pair(Duration::from_secs(600));
    frontend.set_deadline(Some(Instant::now()));
    assert!(matches!(
        frontend.get_features(),
        Err(FrontendError::TimedOut { .. })
    ));
    frontend.set_deadline(None);
    let answer = reply(1, VERSION | FLAG_REPLY, &[0; 8]);
    device.write_all(&answer).unwrap();
    frontend.get_features().unwrap();
}

#[test]
fn a_time_out_that_no_clock_reaches_is_no_limit() {
    let (mut frontend, mut device) = pair(Duration::MAX);
    let answer = reply(1, VERSION | FLAG_REPLY, &[0; 8]);
    device.write_all(&answer).unwrap();
    frontend.get_features().unwrap();
}

#[test]
fn connecting_to_a_device_with_a_full_backlog_times_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _first = Frontend::connect(&path, Duration::from_secs(20)).unwrap();
    let error = Frontend::connect(&path, Duration::from_millis(20)).unwrap_err();
    let FrontendError::Connect { source, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(source.kind(), io::ErrorKind::TimedOut);
}

#[test]
fn wrong_replies_are_refused() {
    let ok = VERSION | FLAG_REPLY;
    for bad in [
        reply(2, ok, &[0; 8]),
        reply(1, VERSION, &[0; 8]),
        reply(1, 2 | FLAG_REPLY, &[0; 8]),
        reply(1, ok, &[0; 4]),
        reply(1, ok, &[]),
        reply(1, ok, &[0; 5000]),
    ] {
        let (mut frontend, mut device) = pair(Duration::from_secs(20));
        device.write_all(&bad).unwrap();
        assert!(
            matches!(frontend.get_features(), Err(FrontendError::Protocol(_))),
            "{bad:?}"
        );
    }
}

#[test]
fn a_closed_connection_is_reported_as_closed() {
    let (mut frontend, device) = pair(Duration::from_secs(20));
    assert!(!frontend.is_closed());
    drop(device);
    assert!(frontend.is_closed());
    assert!(matches!(
        frontend.get_features(),
        Err(FrontendError::Closed)
    ));
}

#[test]
fn a_refusal_under_reply_ack_is_an_error() {
    let (mut frontend, mut device) = pair(Duration::from_secs(20));
    frontend.reply_ack = true;
    device
        .write_all(&reply(3, VERSION | FLAG_REPLY, &5u64.to_ne_bytes()))
        .unwrap();
    assert!(matches!(
        frontend.set_owner(),
        Err(FrontendError::Refused { request, status: 5 }) if request == "SET_OWNER"
    ));
}

#[test]
fn write_config_sends_offset_length_flags_and_bytes() {
    let (mut frontend, mut device) = pair(Duration::from_secs(20));
    frontend.write_config(10, &[3, 0]).unwrap();
    let mut message = [0u8; HEADER_LEN + 14];
    device.read_exact(&mut message).unwrap();
    assert_eq!(ne_u32(&message, 0), FrontendReq::SET_CONFIG as u32);
    let fields = [4, 8, 12, 16, 20].map(|at| ne_u32(&message, at));
    assert_eq!(fields, [VERSION, 14, 10, 2, 0]);
    assert_eq!(message[24..], [3, 0]);
}
