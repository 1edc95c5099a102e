use std::net::UdpSocket;
use std::os::unix::net::{UnixDatagram, UnixStream};

use super::*;

#[test]
fn messages_keep_their_bounds_and_sources() {
    let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = receiver.local_addr().unwrap();
    let [one, two] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
    one.send_to(b"first", to).unwrap();
    two.send_to(b"", to).unwrap();
    one.send_to(&[7; 100], to).unwrap();
    let mut batch = Batch::new(8, 64);
    assert_eq!(batch.receive(&receiver, 8).unwrap(), 3);
    assert_eq!(batch.message(0), b"first");
    assert_eq!(batch.message(1), b"");
    assert_eq!(batch.message(2), [7; 64]);
    assert!(!batch.is_truncated(0) && batch.is_truncated(2));
    assert_eq!(batch.source(0).ip(), one.local_addr().ok());
    assert_eq!(batch.source(1).ip(), two.local_addr().ok());
    assert_eq!(batch.source(0), batch.source(2));
    assert_ne!(batch.source(0), batch.source(1));
    let error = batch.receive(&receiver, 8).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    assert!(batch.is_empty());
}

#[test]
fn a_run_of_messages_is_sent_on_with_their_bounds() {
    let [source, target] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut batch = Batch::new(4, 2000);
    for length in [0, 1, 1400, 3, 5] {
        sender
            .send_to(&vec![length as u8; length], source.local_addr().unwrap())
            .unwrap();
    }
    assert_eq!(batch.receive(&source, 64).unwrap(), 4, "as many as fit");
    // To an address that was received before.
    target
        .send_to(b"here", source.local_addr().unwrap())
        .unwrap();
    let mut other = Batch::new(4, 10);
    assert_eq!(other.receive(&source, 1).unwrap(), 1, "the fifth");
    assert_eq!(other.receive(&source, 1).unwrap(), 1);
    let address = *other.source(0);
    assert_eq!(batch.send(&source, 1..4, Some(&address)).unwrap(), 3);
    assert_eq!(batch.send(&source, 4..9, Some(&address)).unwrap(), 0);
    send_to(&source, b"last", &address).unwrap();
    for wanted in [vec![1; 1], vec![120; 1400], vec![3; 3], b"last".to_vec()] {
        let mut got = [0; 2000];
        let length = target.recv(&mut got).unwrap();
        assert_eq!(got[..length], wanted);
    }
}

/// Sends bytes as one packet of datagrams of `size` bytes.
fn send_segments(sender: &UdpSocket, size: usize, bytes: &[u8]) {
    let mut packet = Batch::new(1, 1 << 16);
    packet.memory[..bytes.len()].copy_from_slice(bytes);
    packet.sources.push(KernelAddress::NONE);
    packet.note(0, bytes.len(), Some(size), false);
    let count = packet.len();
    assert_eq!(
        packet.send_coalesced(sender, 0..count, None).unwrap(),
        count
    );
}

#[test]
fn datagrams_of_one_packet_stay_datagrams() {
    let source = UdpSocket::bind("127.0.0.1:0").unwrap();
    let relay = UdpSocket::bind("127.0.0.1:0").unwrap();
    let target = UdpSocket::bind("127.0.0.1:0").unwrap();
    source.connect(relay.local_addr().unwrap()).unwrap();
    if coalesce_datagrams(&relay).is_err() {
        return println!("SKIPPED: no UDP_GRO (Linux 5.0)");
    }
    let bytes: Vec<u8> = (0..10 * 1000 + 7).map(|at| (at / 1000) as u8).collect();
    send_segments(&source, 1000, &bytes);
    source.send(&[]).unwrap();
    source.send(b"single").unwrap();
    let mut batch = Batch::new(4, 1 << 16);
    assert_eq!(batch.receive_coalesced(&relay, 4).unwrap(), 13);
    assert_eq!(batch.bytes(), bytes.len() + 6);
    assert_eq!(batch.group(0, 13, MAX_SEGMENTS), 11, "one packet");
    let from = source.local_addr().unwrap();
    assert!((0..13).all(|n| batch.source(n).ip() == Some(from)));
    // A part of a packet, the rest of it, and what follows.
    relay.connect(target.local_addr().unwrap()).unwrap();
    assert_eq!(batch.send_coalesced(&relay, 0..3, None).unwrap(), 3);
    assert_eq!(batch.send_coalesced(&relay, 3..13, None).unwrap(), 10);
    let wanted = bytes.chunks(1000).chain([&b""[..], b"single"]);
    for wanted in wanted {
        let mut got = [0; 2000];
        let length = target.recv(&mut got).unwrap();
        assert_eq!(got[..length], *wanted);
    }
}

/// A guest chooses the size of the datagrams in a packet of its network card.
#[test]
fn a_packet_of_too_many_datagrams_is_one_that_is_truncated() {
    let mut batch = Batch::new(MAX_BATCH, 1 << 16);
    for (length, segment, messages) in [
        (65_507, 1, 1),
        (129, 1, 1),
        (128, 1, 128),
        (65_507, 511, 1),
        (65_507, 512, 128),
    ] {
        batch.received.clear();
        batch.note(3, length, Some(segment), false);
        assert_eq!((batch.len(), batch.bytes()), (messages, length));
        assert!((0..messages).all(|n| batch.is_truncated(n) == (messages == 1)));
    }
}

/// As many bytes and datagrams as a peer can have received at once.
#[test]
fn a_coalesced_batch_is_bounded() {
    let source = UdpSocket::bind("127.0.0.1:0").unwrap();
    let relay = UdpSocket::bind("127.0.0.1:0").unwrap();
    source.connect(relay.local_addr().unwrap()).unwrap();
    if coalesce_datagrams(&relay).is_err() {
        return println!("SKIPPED: no UDP_GRO (Linux 5.0)");
    }
    for _ in 0..20 {
        send_segments(&source, 1, &[7; MAX_SEGMENTS]);
    }
    let mut batch = Batch::new(MAX_BATCH, 1 << 16);
    for packets in [MAX_COALESCED, 20 - MAX_COALESCED] {
        let got = batch.receive_coalesced(&relay, MAX_BATCH).unwrap();
        assert_eq!((batch.packets(), got), (packets, packets * MAX_SEGMENTS));
    }
}

#[test]
fn a_packet_that_cannot_be_divided_leaves_as_single_datagrams() {
    let source = UdpSocket::bind("127.0.0.1:0").unwrap();
    let target = UdpSocket::bind("127.0.0.1:0").unwrap();
    source.connect(target.local_addr().unwrap()).unwrap();
    // The kernel needs checksums to divide a packet.
    send_no_checksums(&source);
    send_segments(&source, 500, &[9; 1700]);
    for wanted in [500, 500, 500, 200] {
        assert_eq!(target.recv(&mut [0; 2000]).unwrap(), wanted);
    }
}

fn send_no_checksums(socket: &UdpSocket) {
    let on: libc::c_int = 1;
    // SAFETY: the option's value is an `int`, which lives until the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NO_CHECK,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    assert_eq!(result, 0);
}

#[test]
fn a_unix_source_is_named_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let receiver = UnixDatagram::bind(&path).unwrap();
    let named = UnixDatagram::bind(dir.path().join("n")).unwrap();
    named.send_to(b"a", &path).unwrap();
    let unnamed = UnixDatagram::unbound().unwrap();
    unnamed.send_to(b"b", &path).unwrap();
    let mut batch = Batch::new(8, 64);
    assert_eq!(batch.receive(&receiver, 8).unwrap(), 2);
    assert!(batch.source(0).is_named() && !batch.source(1).is_named());
    let shown = batch.source(0).to_string();
    assert!(shown.ends_with("/n"), "{shown}");
    assert_eq!(batch.source(1).to_string(), "unnamed");
    batch
        .send(&receiver, 0..1, Some(&batch.source(0).clone()))
        .unwrap();
    let mut got = [0; 8];
    assert_eq!(named.recv(&mut got).unwrap(), 1);
}

#[test]
fn a_message_is_received_with_its_descriptors_and_source() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let receiver = UnixDatagram::bind(&path).unwrap();
    let sender = UnixDatagram::bind(dir.path().join("n")).unwrap();
    sender.connect(&path).unwrap();
    let mut batch = Batch::new(8, 64);
    let mut fds = Vec::new();
    let error = batch.receive_with_rights(&receiver, &mut fds).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    let data = [io::IoSlice::new(b"with")];
    fd_passing::send(&sender, &data, &[dir_fd(&dir).as_fd(); 3]).unwrap();
    sender.send(&[7; 65]).unwrap();
    assert_eq!(batch.receive_with_rights(&receiver, &mut fds).unwrap(), 1);
    assert_eq!((batch.len(), batch.message(0)), (1, &b"with"[..]));
    assert_eq!((batch.is_truncated(0), fds.len()), (false, 3));
    let source = *batch.source(0);
    assert!(source.to_string().ends_with("/n"), "{source}");
    batch.send(&receiver, 0..1, Some(&source)).unwrap();
    assert_eq!(sender.recv(&mut [0; 8]).unwrap(), 4);
    batch.receive_with_rights(&receiver, &mut fds).unwrap();
    assert_eq!((batch.message(0).len(), batch.is_truncated(0)), (64, true));
}

fn dir_fd(dir: &tempfile::TempDir) -> std::fs::File {
    std::fs::File::open(dir.path()).unwrap()
}

#[test]
fn errors_of_the_first_message_are_returned() {
    let (one, two) = UnixStream::pair().unwrap();
    let mut batch = Batch::new(8, 64);
    std::io::Write::write_all(&mut (&one), b"x").unwrap();
    assert_eq!(batch.receive(&two, 1).unwrap(), 1);
    drop(one);
    let error = batch.send(&two, 0..1, None).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}
