//! Messages (SEQPACKET) between processes, and between a process and its host.

#[cfg(feature = "tokio")]
mod asynchronous;
mod bounds;
mod ends;
mod hostile;
mod hybrid;
mod in_place;
mod loans;
mod paths;
mod peers;
mod raw;

use std::io::Write;
use std::time::Duration;

use zerosock::Port;
use zerosock::vsock::SeqPacket;

use crate::common;

const PORT: Port = Port::new(5000);

/// A hold time longer than any test.
const FOR_EVER: Duration = Duration::from_secs(600);

/// Sets time-outs of `PATIENCE`.
fn with_time_outs(socket: SeqPacket) -> SeqPacket {
    socket.set_read_timeout(Some(common::PATIENCE)).unwrap();
    socket.set_write_timeout(Some(common::PATIENCE)).unwrap();
    socket
}

/// The bytes of the message with this number.
fn message(number: u64) -> Vec<u8> {
    let random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let len = match random >> 61 {
        0 => 0,
        1 => 1,
        2 => (random >> 32) as usize % 100,
        3..=5 => (random >> 32) as usize % 5000,
        6 => (random >> 32) as usize % 70_000,
        _ => (random >> 32) as usize % 262_145,
    };
    common::bytes(number, len)
}

/// Whether a record ends with this message.
fn ends_record(number: u64) -> bool {
    number.is_multiple_of(3)
}

fn send_all(socket: &SeqPacket, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let message = message(number);
        let eor = ends_record(number);
        if number % 4 < 2 {
            match eor {
                true => socket.send_eor(&message).unwrap(),
                false => socket.send(&message).unwrap(),
            }
            continue;
        }
        // Some loans are larger than what is written.
        let most = (message.len() + number as usize % 7 * 1000).min(262_144);
        let mut loan = socket.loan(most).unwrap();
        loan.write_all(&message).unwrap();
        let sent = match eor {
            true => loan.send_eor().unwrap(),
            false => loan.send().unwrap(),
        };
        assert_eq!(sent, message.len());
    }
}

fn receive_all(socket: &SeqPacket, numbers: std::ops::Range<u64>) {
    let mut out = vec![0; 262_144];
    for number in numbers {
        let expected = message(number);
        if number.is_multiple_of(2) {
            let got = socket.recv(&mut out).unwrap().expect("not the end");
            assert_eq!((got.len, got.copied), (expected.len(), expected.len()));
            assert_eq!(got.end_of_record, ends_record(number), "{number}");
            common::assert_bytes(&out[..got.len], &expected);
        } else {
            let got = socket.recv_leases().unwrap().expect("not the end");
            assert_eq!(got.len(), expected.len(), "{number}");
            assert_eq!(got.end_of_record(), ends_record(number));
            common::assert_bytes(&got.to_vec(), &expected);
        }
    }
}
