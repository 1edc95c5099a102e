//! Unit tests of `notifications`.

use std::io::{IoSlice, Read};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::*;

fn send(socket: &TcpStream, bytes: &[u8]) -> usize {
    // MSG_ZEROCOPY.
    let flags = SendFlags::from_bits_retain(0x400_0000);
    let control = &mut SendAncillaryBuffer::default();
    sendmsg(socket, &[IoSlice::new(bytes)], control, flags).unwrap()
}

#[test]
fn each_send_is_reported_once_by_its_number() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut peer = listener.accept().unwrap().0;
    assert!(permit(&socket));
    let before = reports(&socket).unwrap();
    static BYTES: [u8; 20_000] = [7; 20_000];
    let mut numbers = Vec::new();
    let give_up = Instant::now() + Duration::from_secs(60);
    for round in 0..40 {
        assert_eq!(send(&socket, &BYTES), BYTES.len());
        if round == 0 {
            assert!(reports(&socket).unwrap() > before);
        }
        peer.read_exact(&mut [0; BYTES.len()]).unwrap();
    }
    while numbers.len() < 40 {
        read(&socket, |range| {
            assert!(range.copied, "loopback copies");
            numbers.extend(range.lo..=range.hi);
        })
        .unwrap();
        assert!(Instant::now() < give_up, "{numbers:?}");
        std::thread::yield_now();
    }
    assert_eq!(reports(&socket), Some(before));
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(0..40));
}
