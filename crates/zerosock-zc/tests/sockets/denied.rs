//! Features that the kernel denies for a while are tried again.
//!
//! Each test is a process of its own: restrictions, and features that were found out, belong to a
//! process.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use zerosock_zc::{Copying, Outgoing, Pool, PoolBuf, SendBackend, Sender};

use crate::alone::{alone, skip};
use crate::faults::{limit_locked_memory, without_uring};

const PATIENCE: Duration = Duration::from_secs(300);

#[test]
fn io_uring_is_tried_again_after_a_refusal() {
    alone("denied::io_uring_is_tried_again_after_a_refusal", || {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let address = listener.local_addr().expect("an address");
        let open = || {
            let socket = TcpStream::connect(address).expect("loopback");
            let builder = Sender::builder().backend(SendBackend::Uring);
            builder.open::<Vec<u8>>(socket).is_ok()
        };
        without_uring(|| assert!(!open()));
        assert!(open());
    });
}

#[test]
fn a_pool_is_registered_when_memory_may_be_locked_again() {
    let name = "denied::a_pool_is_registered_when_memory_may_be_locked_again";
    alone(name, || {
        let most = limit_locked_memory(64 << 10);
        let pool = Pool::new(64, 4096).expect("memory");
        let peer = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let address = peer.local_addr().expect("an address");
        socket.connect(address).expect("loopback");
        let builder = Sender::builder().backend(SendBackend::Uring);
        let mut sender: Sender<PoolBuf> = builder.open(socket).expect("a sender");
        let mut send = || {
            let outgoing = Outgoing::new(pool.loan().expect("a block")).copying(Copying::Never);
            let sent = sender.send(outgoing).map_err(|refused| refused.why);
            sent.expect("it is accepted");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            let back = sender.returned().expect("it is free");
            back.outcome.expect("it was sent");
            sender.report().registered
        };
        // The pool is larger than the limit.
        assert_eq!(send(), 0);
        if most < 4 << 20 {
            return skip("memory", name, &"too little of it may be locked");
        }
        let limit = libc::rlimit {
            rlim_cur: most,
            rlim_max: most,
        };
        // SAFETY: a complete `rlimit` that outlives the call.
        let raised = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) };
        assert_eq!(raised, 0);
        assert!((0..3000).any(|_| send() == 1));
    });
}
