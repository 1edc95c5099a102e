//! A forked child drops its copy of a sender: the child survives, and the sender of the parent
//! still works.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::process::ExitStatus;
use std::time::Duration;

use zerosock_zc::{Copying, Outgoing, SendBackend, Sender, SenderOpenError};

use crate::network::BACKENDS;

const PATIENCE: Duration = Duration::from_secs(300);
const LEN: usize = 1 << 20;
/// More than the buffers of both sockets hold.
const SENDS: usize = 32;

/// Runs `child` in a forked child, which exits with 0 after it; how the child ended.
fn forked(child: impl FnOnce()) -> ExitStatus {
    use std::os::unix::process::ExitStatusExt;

    // SAFETY: the child allocates, which the C library allows after a fork, takes no lock that
    // another thread could have, and leaves by _exit.
    match unsafe { libc::fork() } {
        -1 => panic!("no child: {}", std::io::Error::last_os_error()),
        0 => {
            child();
            // SAFETY: it ends this process alone.
            unsafe { libc::_exit(0) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: our own child, which nothing else waits for; `status` is ours.
            let ended = unsafe { libc::waitpid(pid, &raw mut status, 0) };
            assert_eq!(ended, pid);
            ExitStatus::from_raw(status)
        }
    }
}

/// With sends that are queued, under way, and finished but not handled.
fn drops_it(backend: SendBackend) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("an address");
    let socket = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("a peer");
    let (mut peer, _) = listener.accept().expect("a connection");
    peer.set_read_timeout(Some(PATIENCE)).expect("a time");
    let opened = Sender::builder().backend(backend).open(socket);
    if let Err(SenderOpenError::Unavailable(_) | SenderOpenError::Call(_)) = opened {
        eprintln!("no {backend:?} here");
        return;
    }
    let mut sender: Sender = opened.expect("a sender");
    let send = |sender: &mut Sender, fill: usize| {
        let outgoing = Outgoing::new(vec![fill as u8; LEN]).copying(Copying::Never);
        let sent = sender.send(outgoing).map_err(|refused| refused.why);
        sent.expect("a place");
    };
    (0..SENDS).for_each(|fill| send(&mut sender, fill));
    let mut copy = Some(sender);
    // The parent's is taken out only in the child.
    let status = forked(|| drop(copy.take()));
    assert!(status.success(), "{backend:?}: {status}");
    let mut sender = copy.expect("the parent's");
    send(&mut sender, SENDS);
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        peer.read_to_end(&mut got).map(|_| got)
    });
    let closed = sender.close(Some(PATIENCE));
    assert!(closed.is_whole(), "{backend:?}: {:?}", closed.outcome);
    assert_eq!(closed.returned.len(), SENDS + 1);
    let got = reader.join().expect("a reader").expect("no reset");
    assert_eq!(got.len(), (SENDS + 1) * LEN);
    let parts = got.chunks(LEN).enumerate();
    for (fill, part) in parts {
        assert!(part.iter().all(|&byte| byte == fill as u8), "{backend:?}");
    }
}

#[test]
fn a_forked_child_drops_its_copy_and_the_parent_sends_on() {
    BACKENDS.into_iter().for_each(drops_it);
}
