//! Random headers, frames, chains and receive buffers, between two guests on a switch.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use zerosock_proto::wire::net::{
    F_CSUM, F_GUEST_CSUM, F_GUEST_TSO4, F_HOST_TSO4, F_MRG_RXBUF, HEADER_LEN, Header, Offloads,
    Repr,
};

use super::driver::Driver;
use super::frames::tcp;
use super::switch::{Lan, addressed, frame, introduce, mac};

const ALL: u64 = F_MRG_RXBUF | F_CSUM | F_GUEST_CSUM | F_GUEST_TSO4 | F_HOST_TSO4;

/// What the guests do.
#[derive(Clone, Debug)]
enum Step {
    /// The first one sends a frame behind this header, in pieces of these lengths. `cut`: only so many
    /// bytes of both.
    Send {
        header: [u8; HEADER_LEN],
        payload: usize,
        pieces: Vec<usize>,
        cut: Option<usize>,
    },
    /// The second one posts a chain of buffers with these lengths.
    Post(Vec<u32>),
}

/// Any bytes, or those of a TSO frame with one field changed.
fn header() -> impl Strategy<Value = [u8; HEADER_LEN]> {
    let near = (any::<bool>(), 0..HEADER_LEN, any::<u8>());
    let near = near.prop_map(|(segmented, at, byte)| {
        let (mut header, _) = tcp(0, 0);
        if segmented {
            header = super::frames::tso(header);
        }
        header.0[at] = byte;
        header.0
    });
    prop_oneof![
        4 => near,
        2 => Just([0; HEADER_LEN]),
        1 => any::<[u8; HEADER_LEN]>(),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let pieces = prop::collection::vec(1..100_usize, 0..12);
    let cut = prop::option::weighted(0.1, 0..40_usize);
    let send = (header(), 0..4000_usize, pieces, cut);
    let send = send.prop_map(|(header, payload, pieces, cut)| Step::Send {
        header,
        payload,
        pieces,
        cut,
    });
    let post = prop::collection::vec(1..1600_u32, 1..6).prop_map(Step::Post);
    prop_oneof![send, post]
}

/// The frames that have arrived.
fn drain(driver: &mut Driver, into: &mut Vec<(Header, Vec<u8>)>) {
    while let Some(frame) = driver.try_receive(0, Duration::ZERO) {
        into.push(frame);
    }
}

/// Carries out the steps; then an honest frame has to pass.
fn run(steps: &[Step], features: u64) {
    let lan = Lan::new(&[None; 2], None);
    let (mut a, mut b) = (lan.attach(0, ALL), lan.attach(1, features));
    introduce(&mut [&mut a, &mut b]);
    b.posts_too_little = true;
    // A frame that waits for buffers is dropped after 100 ms; its first bytes are in those it had.
    b.lax = true;
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    for (seed, step) in (0..).zip(steps) {
        match step {
            Step::Post(lens) => b.post(0, lens),
            Step::Send {
                header,
                payload,
                pieces,
                cut,
            } => {
                let (_, bytes) = tcp(*payload, seed);
                let bytes = addressed(bytes, mac(1), mac(0));
                let all = [&header[..], &bytes].concat();
                let all = all.get(..cut.unwrap_or(all.len())).unwrap_or(&all);
                if !all.is_empty() {
                    a.send_bytes(1, all, pieces);
                    a.wait_sent(0);
                    sent.push(all.get(HEADER_LEN..).unwrap_or_default().to_vec());
                }
            }
        }
        drain(&mut b, &mut received);
    }
    let last = frame(mac(1), mac(0), 60, 0xff);
    let mut attempts = 0;
    while received.last().is_none_or(|(_, bytes)| *bytes != last) {
        // On a busy machine a frame may wait for too long: then it is sent again.
        assert!(attempts < 40, "no honest frame passes");
        attempts += 1;
        b.post_many(0, 2, 2048);
        a.send(0, &Header::default(), &last, &[]);
        a.wait_sent(0);
        received.extend(b.try_receive(0, Duration::from_secs(1)));
        drain(&mut b, &mut received);
    }
    check(&sent, &received, &last, Offloads::of_driver(features));
    a.check_guards();
    b.check_guards();
    lan.server.shutdown();
}

/// Each header is valid for the receiver. Frames that are passed on as they are come in their order and
/// with their bytes.
fn check(sent: &[Vec<u8>], received: &[(Header, Vec<u8>)], last: &[u8], offloads: Offloads) {
    let mut sent = sent.iter();
    for (header, bytes) in received {
        let repr = Repr::parse(header, bytes.len(), offloads);
        assert!(repr.is_ok(), "{header:?}: {repr:?}");
        if offloads.tso4 && bytes != last {
            assert!(sent.any(|sent| sent == bytes), "a frame that was not sent");
        }
    }
}

/// Runs random cases without files of failures: the steps of a failure are printed.
fn random(features: u64) {
    let config = Config {
        cases: 48,
        failure_persistence: None,
        ..Config::default()
    };
    let steps = prop::collection::vec(step(), 0..40);
    let result = TestRunner::new(config).run(&steps, |steps| {
        run(&steps, features);
        Ok(())
    });
    result.unwrap();
}

/// The device cannot skip a chain that is too short for a header while it has popped one before it.
#[test]
fn a_chain_that_is_too_short_behind_one_with_little_room_does_not_end_the_reception() {
    let lan = Lan::new(&[None; 2], None);
    let (mut a, mut b) = (lan.attach(0, ALL), lan.attach(1, F_MRG_RXBUF));
    introduce(&mut [&mut a, &mut b]);
    b.posts_too_little = true;
    b.lax = true;
    let mut received = Vec::new();
    drain(&mut b, &mut received);
    b.post(0, &[20]);
    b.post(0, &[5]);
    b.post_many(0, 4, 2048);
    let sent = frame(mac(1), mac(0), 60, 7);
    let passes = (0..30).any(|_| {
        a.send(0, &Header::default(), &sent, &[]);
        a.wait_sent(0);
        let received = b.try_receive(0, Duration::from_secs(1));
        received.is_some_and(|(_, bytes)| bytes == sent)
    });
    assert!(passes, "no frame passes");
}

#[test]
fn random_frames_reach_a_receiver_with_offloads_whole_or_not_at_all() {
    random(ALL);
}

#[test]
fn random_frames_reach_a_receiver_without_offloads_with_plain_headers() {
    random(F_MRG_RXBUF);
}
