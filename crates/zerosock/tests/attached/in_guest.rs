//! A program that attaches at the socket of an agent, which gives it memory and a doorbell: streams, messages and
//! datagrams pass without a copy between it and the program that embeds the device, with calls that sleep, tokio and
//! `Poller`; and what it reports when the agent breaks the protocol or ends the doorbell.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::thread;

use zerosock::Address;
use zerosock::Cid;
use zerosock::vsock::{Datagram, Endpoint, Fault, Poller, Readiness, Stream, Trust, Wait};

use super::agent::Agent;
use super::hub::Hub;
use super::{PORT, patient};
use crate::common::{PATIENCE, assert_bytes, bytes};

/// Bytes of a transfer.
const LEN: usize = 4 << 20;

/// Sends `bytes` in loans.
fn lend(stream: &Stream, bytes: &[u8]) -> io::Result<()> {
    let mut left = bytes;
    while !left.is_empty() {
        let mut loan = stream.loan(left.len())?;
        assert!(loan.is_in_place());
        let len = left.len().min(loan.capacity());
        loan.write_all(&left[..len])?;
        let sent = loan.send()?;
        left = &left[sent..];
    }
    stream.shutdown(Shutdown::Write)
}

/// Receives all bytes by leases in place.
fn leased(stream: &Stream) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(lease) = stream.recv()? {
        assert!(lease.is_in_place());
        all.extend(lease.to_vec());
    }
    Ok(all)
}

/// Streams some MiB both ways at once.
fn exchange(hub: &Hub, program: &Endpoint) {
    let (ours, theirs) = hub.joined(program);
    let (down, up) = (bytes(1, LEN), bytes(2, LEN));
    thread::scope(|scope| {
        let sending = [
            scope.spawn(|| lend(&ours, &down)),
            scope.spawn(|| lend(&theirs, &up)),
        ];
        let got_up = scope.spawn(|| leased(&ours));
        assert_bytes(&leased(&theirs).unwrap(), &down);
        assert_bytes(&got_up.join().unwrap().unwrap(), &up);
        for sent in sending {
            sent.join().unwrap().unwrap();
        }
    });
}

#[test]
fn streams_pass_in_place_both_ways_and_nothing_is_copied() {
    for wait in [Wait::Sleep, Wait::ADAPTIVE] {
        let hub = Hub::new();
        let agent = Agent::new(hub.vm(), |_| {});
        let program = Endpoint::builder().wait(wait).attach(agent.path()).unwrap();
        assert_eq!(program.cid(), Cid::new(3));
        exchange(&hub, &program);
        let stats = program.stats();
        assert_eq!(
            (stats.copied_in, stats.copied_aside, stats.copied_out),
            (0, 0, 0)
        );
        assert_eq!(
            (stats.sent_in_place, stats.received_in_place),
            (LEN as u64, LEN as u64)
        );
        let stats = hub.stats();
        assert_eq!(
            (stats.copied_in, stats.copied_aside, stats.copied_out),
            (0, 0, 0)
        );
        assert_eq!(
            (stats.sent_in_place, stats.received_in_place),
            (LEN as u64, LEN as u64)
        );
        drop(program);
        agent.join();
    }
}

#[test]
fn a_program_with_a_thread_of_the_library_answers_while_it_does_something_else() {
    let hub = Hub::new();
    let agent = Agent::new(hub.vm(), |_| {});
    let program = Endpoint::builder()
        .background()
        .attach(agent.path())
        .unwrap();
    let (ours, mut theirs) = hub.joined(&program);
    let mut ours = patient(ours);
    ours.write_all(b"ping").unwrap();
    let mut got = [0; 4];
    theirs.read_exact(&mut got).unwrap();
    theirs.write_all(&got).unwrap();
    ours.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"ping");
}

#[test]
fn messages_and_datagrams_pass() {
    let hub = Hub::new();
    let agent = Agent::new(hub.vm(), |_| {});
    let program = Endpoint::attach(agent.path()).unwrap();
    let listener = hub.listen_seqpacket(PORT, 4).unwrap();
    let theirs = program
        .connect_seqpacket(Address::new(Cid::HOST, PORT))
        .unwrap();
    let (ours, _) = listener.accept_timeout(PATIENCE).unwrap();
    theirs.set_write_timeout(Some(PATIENCE)).unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    let message = bytes(3, 100_000);
    theirs.send(&message).unwrap();
    let mut got = vec![0; message.len() + 1];
    let received = ours.recv(&mut got).unwrap().expect("a message");
    assert_eq!(received.len, message.len());
    assert_bytes(&got[..message.len()], &message);

    let host = Datagram::bind(&*hub, PORT).unwrap();
    let guest = Datagram::bind(&program, PORT).unwrap();
    host.set_read_timeout(Some(PATIENCE)).unwrap();
    guest.set_read_timeout(Some(PATIENCE)).unwrap();
    guest.send_to(b"up", Address::new(Cid::HOST, PORT)).unwrap();
    let (len, from) = host.recv_from(&mut got).unwrap();
    assert_eq!(
        (&got[..len], from),
        (b"up".as_slice(), Address::new(program.cid(), PORT))
    );
    host.send_to(b"down", from).unwrap();
    let (len, _) = guest.recv_from(&mut got).unwrap();
    assert_eq!(&got[..len], b"down");
}

/// Reads each word that arrives on the stream and sends it back, until the end.
fn echo_by_poller(stream: &Stream) {
    stream.set_nonblocking(true).unwrap();
    let mut poller = Poller::new(Wait::Sleep);
    poller.add_stream(stream, 7, Readiness::READABLE);
    let mut word = [0; 8];
    loop {
        let ready = poller.wait(Some(PATIENCE)).unwrap();
        assert!(!ready.is_empty(), "no event in time");
        let mut stream = stream;
        match stream.read(&mut word) {
            Ok(0) => return,
            Ok(len) => stream.write_all(&word[..len]).unwrap(),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
    }
}

/// Sends words and waits for each to come back.
fn ask(stream: &Stream) {
    let mut stream = stream;
    for round in 0..500_u64 {
        stream.write_all(&round.to_le_bytes()).unwrap();
        let mut word = [0; 8];
        stream.read_exact(&mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), round);
    }
    stream.shutdown(Shutdown::Write).unwrap();
}

#[test]
fn a_poller_and_a_thread_sleep_on_one_doorbell() {
    let hub = Hub::new();
    let agent = Agent::new(hub.vm(), |_| {});
    let program = Endpoint::attach(agent.path()).unwrap();
    let (one, polled) = hub.joined(&program);
    let (two, slept) = hub.joined(&program);
    thread::scope(|scope| {
        scope.spawn(|| echo_by_poller(&polled));
        scope.spawn(|| {
            let (mut slept, mut word) = (&slept, [0; 8]);
            while slept.read(&mut word).unwrap() > 0 {
                slept.write_all(&word).unwrap();
            }
        });
        scope.spawn(|| ask(&one));
        ask(&two);
    });
}

#[cfg(feature = "tokio")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_of_tokio_sleep_on_a_doorbell() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use zerosock::vsock::tokio::AsyncStream;

    let hub = Hub::new();
    let agent = Agent::new(hub.vm(), |_| {});
    let program = Endpoint::attach(agent.path()).unwrap();
    let (ours, theirs) = hub.joined(&program);
    let asking = thread::spawn(move || {
        ask(&ours);
        ours
    });
    let mut theirs = AsyncStream::new(theirs).unwrap();
    let mut word = [0; 8];
    let echo = async {
        while theirs.read_exact(&mut word).await.is_ok() {
            theirs.write_all(&word).await.unwrap();
        }
    };
    tokio::time::timeout(PATIENCE, echo)
        .await
        .expect("no event in time");
    asking.join().unwrap();
}

/// The memory is the agent's: the bytes are one, at two addresses.
#[test]
fn leases_and_loans_of_a_program_that_trusts_are_plain_slices() {
    let hub = Hub::new();
    let agent = Agent::new(hub.vm(), |_| {});
    // SAFETY: host and agent are in this test. The host writes no leased buffer, the agent writes nothing, and the
    // memory is sealed.
    let trust = unsafe { Trust::declare() };
    let program = Endpoint::builder()
        .trust_host(trust)
        .attach(agent.path())
        .unwrap();
    let (ours, theirs) = hub.joined(&program);
    let mut loan = theirs.loan(5).unwrap();
    loan.as_mut_slice().unwrap().copy_from_slice(b"hello");
    loan.set_filled(5);
    loan.send().unwrap();
    let lease = ours.recv().unwrap().unwrap();
    assert_eq!(lease.to_vec(), b"hello");
    let mut loan = ours.loan(5).unwrap();
    assert!(
        loan.as_mut_slice().is_err(),
        "the host has no slice of a guest's memory"
    );
    loan.write_all(b"again").unwrap();
    loan.send().unwrap();
    let lease = theirs.recv().unwrap().unwrap();
    assert_eq!(lease.into_bytes().unwrap(), b"again"[..]);
}

#[test]
fn an_end_of_the_agent_ends_the_connections() {
    let hub = Hub::new();
    let agent = Agent::new(hub.vm(), |_| {});
    let program = Endpoint::attach(agent.path()).unwrap();
    let (ours, theirs) = hub.joined(&program);
    // The agent ends when its connection closes; the doorbell goes with it.
    drop(program.resolve("nobody").unwrap_err());
    agent.join();
    theirs.recv().unwrap_err();
    program.connect(Address::new(Cid::HOST, PORT)).unwrap_err();
    drop(ours);
}

#[test]
fn a_device_that_starts_with_other_features_is_refused() {
    let hub = Hub::new();
    let agent = Agent::new(hub.vm(), |answer| answer.features ^= 1 << 29);
    let error = Endpoint::attach(agent.path()).unwrap_err();
    assert_eq!(error.fault(), Fault::Peer);
    assert!(error.to_string().contains("features"), "{error}");
    let kind = io::Error::from(error).kind();
    assert_eq!(kind, io::ErrorKind::Unsupported);
    agent.join();
}

#[test]
fn a_refused_start_is_reported() {
    use zerosock::attach::Status;
    let hub = Hub::new();
    let agent = Agent::new(hub.vm(), |answer| answer.status = Status::ServerFailed);
    let error = Endpoint::attach(agent.path()).unwrap_err();
    assert!(
        error.to_string().contains("failed in the server"),
        "{error}"
    );
    agent.join();
}

#[test]
fn settings_out_of_range_are_refused_before_the_agent_is_asked() {
    let error = Endpoint::builder()
        .queue_size(100)
        .attach("/nowhere")
        .unwrap_err();
    assert_eq!(error.fault(), Fault::Caller);
    assert!(error.to_string().contains("queue_size 100"), "{error}");
}
