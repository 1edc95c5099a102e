//! Unit tests of `fd_passing`.

use super::*;
use rustix::fs::{fstat, memfd_create};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

fn files(count: usize) -> Vec<OwnedFd> {
    (0..count)
        .map(|_| memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
        .collect()
}

#[test]
fn descriptors_arrive_closed_on_exec() {
    let (a, b) = UnixStream::pair().unwrap();
    let sent = files(3);
    let borrowed: Vec<_> = sent.iter().map(|fd| fd.as_fd()).collect();
    let data = [IoSlice::new(b"he"), IoSlice::new(b"llo")];
    assert_eq!(send(&a, &data, &borrowed).unwrap(), 5);

    let mut buf = [0; 16];
    let mut got = Vec::new();
    let received = recv(&b, &mut buf, &mut got).unwrap();
    assert_eq!(
        received,
        ReceivedRights {
            bytes: 5,
            truncated_fds: false
        }
    );
    assert_eq!(&buf[..5], b"hello");
    assert_eq!(got.len(), 3);
    for (sent, got) in sent.iter().zip(&got) {
        assert_eq!(fstat(sent).unwrap().st_ino, fstat(got).unwrap().st_ino);
        assert!(fcntl_getfd(got).unwrap().contains(FdFlags::CLOEXEC));
    }
}

#[test]
fn the_most_descriptors_of_a_message_are_received() {
    let (a, b) = UnixStream::pair().unwrap();
    let sent = files(MAX_FDS + 1);
    let borrowed: Vec<_> = sent.iter().map(|fd| fd.as_fd()).collect();
    let error = send(&a, &[IoSlice::new(b"x")], &borrowed).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    // The kernel has the same limit.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    sendmsg(&a, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap_err();

    send(&a, &[IoSlice::new(b"x")], &borrowed[1..]).unwrap();
    let mut got = Vec::new();
    let received = recv(&b, &mut [0; 4], &mut got).unwrap();
    let expected = ReceivedRights {
        bytes: 1,
        truncated_fds: false,
    };
    assert_eq!((received, got.len()), (expected, MAX_FDS));
}

/// The sender's credentials take room, too.
#[test]
fn a_socket_with_passcred_receives_every_descriptor() {
    let (a, b) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_passcred(&b, true).unwrap();
    let sent = files(MAX_FDS);
    let borrowed: Vec<_> = sent.iter().map(|fd| fd.as_fd()).collect();
    send(&a, &[IoSlice::new(b"x")], &borrowed).unwrap();
    let mut got = Vec::new();
    let received = recv(&b, &mut [0; 4], &mut got).unwrap();
    assert!(!received.truncated_fds);
    assert_eq!(got.len(), MAX_FDS);
}

#[test]
fn only_an_empty_unnamed_unix_stream_is_made_send_only() {
    use std::io::Write;
    let (a, b) = UnixStream::pair().unwrap();
    assert!(make_send_only(&b));
    (&a).write_all(b"x").unwrap_err();
    (&b).write_all(b"x").unwrap();

    let (a, b) = UnixStream::pair().unwrap();
    (&a).write_all(b"x").unwrap();
    assert!(!make_send_only(&b), "something is in it");

    // The byte is received, its descriptor stays in the queue.
    let (a, b) = UnixStream::pair().unwrap();
    let (passed, other) = UnixStream::pair().unwrap();
    if send_urgent(&a, b'x', passed).is_ok() {
        assert_eq!(net::recv(&b, &mut [0; 1], RecvFlags::OOB).unwrap().1, 1);
        assert!(!make_send_only(&b), "a descriptor is in it");
    }
    drop(other);

    let dir = tempfile::tempdir().unwrap();
    let listener = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
    let ours = UnixStream::connect(dir.path().join("s")).unwrap();
    assert!(!make_send_only(&ours), "connected to a name");
    assert!(!make_send_only(&listener));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert!(!make_send_only(&tcp));
    assert!(!make_send_only(&files(1)[0]));
}

/// Sends an out-of-band byte with a descriptor.
fn send_urgent(to: impl AsFd, byte: u8, fd: impl Into<OwnedFd>) -> rustix::io::Result<usize> {
    let fd = fd.into();
    let fds = [fd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(to, &[IoSlice::new(&[byte])], &mut control, SendFlags::OOB)
}

#[test]
fn descriptor_of_an_out_of_band_byte_is_received() {
    let (a, b) = UnixStream::pair().unwrap();
    receive_urgent_inline(&b).unwrap();
    let (passed, other) = UnixStream::pair().unwrap();
    if send_urgent(&a, b'x', passed).is_err() {
        return eprintln!("SKIPPED: no MSG_OOB for Unix sockets (CONFIG_AF_UNIX_OOB)");
    }
    send(&a, &[IoSlice::new(b"yz")], &[]).unwrap();
    let (mut buf, mut got) = ([0; 8], Vec::new());
    let mut bytes = Vec::new();
    while bytes.len() < 3 {
        let received = recv(&b, &mut buf, &mut got).unwrap();
        bytes.extend_from_slice(&buf[..received.bytes]);
    }
    assert_eq!(bytes, b"xyz");
    assert_eq!(got.len(), 1, "the kernel has closed the descriptor");
    drop(other);
}

#[test]
fn a_socket_that_refuses_descriptors_gets_none() {
    let (a, b) = UnixStream::pair().unwrap();
    assert!(!refuses_rights(&b));
    if !refuse_rights(&b).unwrap() {
        return eprintln!("SKIPPED: no SO_PASSRIGHTS (Linux 6.16)");
    }
    assert!(refuses_rights(&b));
    let file = files(1);
    let borrowed = [file[0].as_fd()];
    let error = send(&a, &[IoSlice::new(b"x")], &borrowed).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    send(&a, &[IoSlice::new(b"x")], &[]).unwrap();
}

#[test]
fn receive_does_not_block_and_returns_0_at_end_of_file() {
    let (a, b) = UnixStream::pair().unwrap();
    let mut got = Vec::new();
    let error = recv(&b, &mut [0; 4], &mut got).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    let block = [0; 65536];
    let error = loop {
        if let Err(error) = send(&a, &[IoSlice::new(&block)], &[]) {
            break error;
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    drop(b);
    let error = send(&a, &[IoSlice::new(&block)], &[]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);

    let (a, b) = UnixStream::pair().unwrap();
    drop(a);
    let received = recv(&b, &mut [0; 4], &mut got).unwrap();
    assert_eq!(
        received,
        ReceivedRights {
            bytes: 0,
            truncated_fds: false
        }
    );
    assert!(got.is_empty());
}
