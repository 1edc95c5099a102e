//! Buffers return to a process while its host makes no further call.
//!
//! The process writes its rings by hand, so that it sees a returned buffer in memory.

use std::thread;

use zerosock::vsock::Stream;
use zerosock_proto::wire::vsock::Op;

use super::hub::Hub;
use super::taken_back::process;
use super::{PORT, patient};
use crate::common::PATIENCE;
use crate::common::raw::{SIZE, TX};

/// As many as are published to the process at once: an eighth of the queue.
const PACKETS: u16 = SIZE / 8;

#[test]
fn leases_dropped_by_another_thread_during_a_batch_are_back_when_it_ends() {
    let mut hub = Hub::new();
    let (mut guest, _place) = process(&hub);
    let listener = hub.listen(PORT, 4).unwrap();
    // One packet on each of several connections: a single one may not hold so many buffers.
    let streams: Vec<Stream> = (0..u32::from(PACKETS))
        .map(|port| {
            guest.connect(port, PORT.get());
            let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
            guest.send(guest.header(port, PORT.get(), Op::Rw), b"bytes");
            patient(stream)
        })
        .collect();
    let leases: Vec<_> = streams
        .iter()
        .map(|stream| stream.recv().unwrap().unwrap())
        .collect();
    assert!(leases.iter().all(|lease| lease.is_in_place()));
    let before = guest.used_index(TX);
    // Otherwise the thread's next turn would return them.
    hub.stop_pump();
    let batch = streams[0].batch();
    thread::scope(|scope| scope.spawn(|| drop(leases)).join().unwrap());
    assert_eq!(guest.used_index(TX), before, "the batch has the lock");
    drop(batch);
    let after = guest.used_index(TX);
    assert_eq!(after, before.wrapping_add(PACKETS));
}
