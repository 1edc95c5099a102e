//! Datagrams and packets: contents, bounds, half-close and abrupt close, or the new connection that follows
//! the close of an association's target.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendFlags, Shutdown, SocketAddrAny, recvfrom, send, sendto, shutdown,
};

use super::Rig;
use super::ends::Kind;
use crate::pattern;
use crate::process::{DEADLINE, wait_until};

pub(super) fn wait_readable(fd: BorrowedFd<'_>) {
    let limit = Timespec::try_from(DEADLINE).unwrap();
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    assert_eq!(poll(&mut polled, Some(&limit)).unwrap(), 1, "a time-out");
}

/// The test's end of a connection or association.
pub(super) struct Peer {
    fd: OwnedFd,
    /// The socket of the relay, if this one is not connected.
    to: Option<SocketAddrAny>,
}

impl Peer {
    pub(super) fn new(fd: OwnedFd) -> Peer {
        Peer { fd, to: None }
    }

    fn send(&self, message: &[u8]) {
        let sent = match &self.to {
            Some(to) => sendto(&self.fd, message, SendFlags::NOSIGNAL, to),
            None => send(&self.fd, message, SendFlags::NOSIGNAL),
        };
        assert_eq!(sent.unwrap(), message.len());
    }

    fn try_recv(&mut self) -> Result<Vec<u8>, Errno> {
        wait_readable(self.fd.as_fd());
        let mut message = vec![0; 200_000];
        let (got, _, from) = recvfrom(&self.fd, &mut message[..], RecvFlags::empty())?;
        self.to = self.to.take().or(from.filter(|_| !is_connected(&self.fd)));
        message.truncate(got);
        Ok(message)
    }

    fn recv(&mut self) -> Vec<u8> {
        self.try_recv().unwrap()
    }
}

fn is_connected(fd: &OwnedFd) -> bool {
    rustix::net::getpeername(fd).is_ok_and(|peer| peer.is_some())
}

pub(super) fn run(rig: &mut Rig<'_>) {
    contents_and_bounds(rig);
    for end in [0, 1] {
        if is_of_association(rig.kinds(), end) {
            new_connection_after_half_close(rig, end);
            new_connection_after_abrupt_close(rig, end);
        } else if rig.kinds()[end].is_packet() {
            half_close(rig, end);
            abrupt_close(rig, end);
        }
    }
    if !rig.kinds().iter().any(|kind| kind.is_packet()) {
        // The associations end with the relay.
        rig.stop();
    }
}

/// The end at which the first message comes.
fn beginning(rig: &Rig<'_>) -> usize {
    let kinds = rig.kinds();
    let begins = |end: usize| kinds[end].listens();
    let packets = |end: usize| kinds[end].is_packet();
    (0..2)
        .find(|&end| begins(end))
        .or((0..2).find(|&end| packets(end)))
        .unwrap()
}

/// Both peers, in the order of the ends, after the message "begin" from one to the other.
fn connect(rig: &mut Rig<'_>) -> [Peer; 2] {
    rig.start();
    let first = beginning(rig);
    let peer = |end: usize| match rig.ends[end].kind.listens() {
        true => rig.ends[end].client(rig.world),
        false => rig.ends[end].target(),
    };
    let one = peer(first);
    one.send(b"begin");
    let mut other = peer(1 - first);
    assert_eq!(other.recv(), b"begin", "{}", rig.about());
    match first {
        0 => [one, other],
        _ => [other, one],
    }
}

fn contents_and_bounds(rig: &mut Rig<'_>) {
    let first = beginning(rig);
    let mut peers = connect(rig);
    let large = match rig.kinds().iter().any(|kind| kind.is_udp()) {
        true => 65_507,
        false => 150_000,
    };
    for length in [1, 0, 1400, large, 3] {
        for end in [first, 1 - first] {
            peers[end].send(&pattern(length));
            let got = peers[1 - end].recv();
            assert!(
                got == pattern(length),
                "{length} from {end}: {}",
                rig.about()
            );
        }
    }
    // Several at once.
    for n in 0..20u8 {
        peers[first].send(&[n; 10]);
    }
    let mut got: Vec<_> = (0..20).map(|_| peers[1 - first].recv()).collect();
    if rig.way == "sockmap" {
        // The kernel may change the order of datagrams (docs/sockmap.md).
        got.sort_unstable();
    }
    let sent: Vec<_> = (0..20).map(|n| vec![n; 10]).collect();
    assert_eq!(got, sent, "{}", rig.about());
}

/// Whether the end is of packets, and the target of an association: a new sender, or the same one later,
/// has a new connection to it. Such an end has no half-close.
pub(super) fn is_of_association(kinds: [Kind; 2], end: usize) -> bool {
    let other = kinds[1 - end];
    kinds[end].is_packet() && other.is_datagram() && other.listens()
}

fn new_connection_after_half_close(rig: &mut Rig<'_>, end: usize) {
    let mut peers = connect(rig);
    peers[end].send(b"last");
    shutdown(&peers[end].fd, Shutdown::Write).unwrap();
    assert_eq!(peers[1 - end].recv(), b"last", "{}", rig.about());
    assert_new_connection(rig, end, peers);
}

fn new_connection_after_abrupt_close(rig: &mut Rig<'_>, end: usize) {
    let peers = connect(rig);
    peers[1 - end].send(b"unread");
    wait_readable(peers[end].fd.as_fd());
    assert_new_connection(rig, end, peers);
}

fn half_close(rig: &mut Rig<'_>, end: usize) {
    let mut peers = connect(rig);
    peers[end].send(b"last");
    shutdown(&peers[end].fd, Shutdown::Write).unwrap();
    assert_eq!(peers[1 - end].recv(), b"last", "{}", rig.about());
    if rig.kinds()[1 - end].is_packet() {
        assert_eq!(peers[1 - end].recv(), b"", "{}", rig.about());
    }
    peers[1 - end].send(b"after the end");
    assert_eq!(peers[end].recv(), b"after the end", "{}", rig.about());
}

fn abrupt_close(rig: &mut Rig<'_>, end: usize) {
    let mut peers = connect(rig);
    if end == 1 {
        peers.reverse();
    }
    let [closed, mut kept] = peers;
    kept.send(b"unread");
    wait_readable(closed.fd.as_fd());
    drop(closed);
    // docs/relay.md: a Unix socket gets an end of file.
    if rig.kinds()[1 - end].is_packet() {
        assert_eq!(kept.try_recv(), Ok(Vec::new()), "{}", rig.about());
    }
}

/// The end of a target's connection ends its association, and the sender's next datagram begins another.
fn assert_new_connection(rig: &Rig<'_>, end: usize, peers: [Peer; 2]) {
    let [one, other] = peers;
    let (closed, sender) = match end {
        0 => (one, other),
        _ => (other, one),
    };
    drop(closed);
    // What comes before the relay has seen the end is lost.
    wait_until("a new connection", || {
        sender.send(b"again");
        rig.ends[end].has_connection()
    });
    let mut next = rig.ends[end].target();
    assert_eq!(next.recv(), b"again", "{}", rig.about());
}
