//! More pools than a ring has room for: everything arrives, and the counts of registered memory are
//! correct.

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc;
use std::time::Duration;

use zerosock_zc::{Copying, Outgoing, Pool, PoolBuf, SendBackend, Sender};

use crate::network::{CABLE, SINK, accept, fill, with_cable, with_sink};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);
/// Six more than there is room for.
const POOLS: usize = 70;
const ROOM: usize = 64;
const BLOCK: usize = 4096;

fn pools() -> Vec<Pool> {
    let pool = |_| Pool::new(4, BLOCK).expect("memory");
    (0..POOLS).map(pool).collect()
}

fn open(socket: impl Into<std::os::fd::OwnedFd>) -> Sender<PoolBuf> {
    let builder = Sender::builder().backend(SendBackend::Uring);
    builder.open(socket).expect("a sender")
}

/// The addresses of the memory that the kernel lists as registered with the ring of the sender.
fn registered(sender: &Sender<PoolBuf>) -> Vec<usize> {
    let path = format!("/proc/self/fdinfo/{}", sender.as_fd().as_raw_fd());
    let told = std::fs::read_to_string(path).expect("the ring");
    let buffers = told
        .lines()
        .skip_while(|line| !line.starts_with("UserBufs"));
    let entry = |line: &str| {
        let (address, _) = line.split_once(": 0x")?.1.split_once('/')?;
        usize::from_str_radix(address, 16).ok()
    };
    buffers
        .skip(1)
        .map_while(|line| line.contains(": ").then_some(line))
        .filter_map(entry)
        .collect()
}

#[test]
fn the_count_of_registered_requests_is_correct() {
    with_sink("what_is_counted_as_registered", || {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
        socket.connect(SINK[0]).expect("a route");
        let mut sender = open(socket);
        // A new pool gives its first block first.
        let bases = |pools: &[Pool]| -> Vec<usize> {
            let blocks: Vec<_> = pools
                .iter()
                .map(|pool| pool.loan().expect("a block"))
                .collect();
            blocks.iter().map(|block| block.as_ptr() as usize).collect()
        };
        // How many of the requests were made from registered memory.
        let send = |sender: &mut Sender<PoolBuf>, pool: &Pool| {
            let before = sender.stats();
            let block = pool.loan().expect("a block");
            let outgoing = Outgoing::new(block).copying(Copying::Never);
            let sent = sender.send(outgoing).map_err(|refused| refused.why);
            sent.expect("it is accepted");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            sender
                .returned()
                .expect("it is free")
                .outcome
                .expect("it was sent");
            let after = sender.stats();
            assert_eq!(after.requests - before.requests, 1);
            after.registered - before.registered
        };
        let mut pools = pools();
        let bases = bases(&pools);
        for _ in 0..3 {
            for (index, pool) in pools.iter().enumerate() {
                assert_eq!(send(&mut sender, pool), u64::from(index < ROOM), "{index}");
            }
        }
        assert_eq!(sender.report().registered, ROOM);
        assert_eq!(registered(&sender), bases[..ROOM]);

        // The new arena replaces the least recently used one.
        let begun = (0..3000).position(|_| send(&mut sender, &pools[ROOM]) == 1);
        assert!(begun.expect("it is registered") > 900, "{begun:?}");
        assert_eq!(sender.report().registered, ROOM);
        assert_eq!(registered(&sender)[0], bases[ROOM]);
        assert_eq!(send(&mut sender, &pools[1]), 1);
        assert_eq!(registered(&sender).len(), ROOM);

        // An arena without pool and blocks is unregistered when a new one is registered.
        pools.truncate(10);
        let new = Pool::new(4, BLOCK).expect("memory");
        while send(&mut sender, &new) == 0 {}
        assert_eq!(sender.report().registered, 9 + 1);
        assert_eq!(registered(&sender).len(), 9 + 1);
    });
}

#[test]
fn blocks_of_many_pools_arrive() {
    for [near, far] in CABLE {
        let (told, address) = mpsc::channel();
        let ends = with_cable(
            "blocks_of_many_pools_arrive",
            move || {
                let address: SocketAddr = address.recv().expect("the far end");
                let _ = near;
                let mut sender = open(TcpStream::connect(address).expect("the cable"));
                let pools = pools();
                // All of them in turns, then some, so that those replace others.
                let all = (0..30).flat_map(|_| 0..POOLS);
                let some = (0..300).flat_map(|_| ROOM - 2..POOLS);
                let mut at = 0;
                for index in all.clone().chain(some).chain(all) {
                    let mut block = loop {
                        match pools[index].loan() {
                            Some(block) => break block,
                            None => sender.wait(Some(PATIENCE)).expect("the kernel answers"),
                        }
                        while let Some(returned) = sender.returned() {
                            returned.outcome.expect("it was sent");
                            // The receiver must not see bytes that are written now.
                            { returned.buffer }.fill(0xee);
                        }
                    };
                    fill(&mut block, at);
                    at += block.len() as u64;
                    let outgoing = Outgoing::new(block).copying(Copying::Never);
                    let sent = sender.send(outgoing).map_err(|refused| refused.why);
                    sent.expect("it is accepted");
                }
                assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
                let stats = sender.stats();
                assert!(stats.failed == 0 && stats.bytes == at, "{stats:?}");
                assert!(stats.registered < stats.requests, "{stats:?}");
                assert_eq!(sender.report().registered, ROOM);
                at
            },
            move || {
                let listener = TcpListener::bind(far).expect("an address");
                let address = listener.local_addr().expect("an address");
                told.send(address).expect("the near end");
                check(accept(&listener))
            },
        );
        let Some((sent, received)) = ends else { return };
        assert_eq!(sent, received);
    }
}
