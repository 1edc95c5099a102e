//! Receive maps: the example and error cases of the patch set, the native form, polling, bounds.
//!
//! Packets that wait for 20 ms are copied and then have one header for all their bytes. A test of
//! single packets tries again if a busy machine has caused that.

mod bounds;
mod document;
mod native;
mod polling;

use std::io::Read;
use std::thread;
use std::time::Instant;

use crate::common::{PATIENCE, TestDaemon, bytes};
use zerosock::vsock::{Endpoint, EndpointBuilder, Stream};
use zerosock::{Address, Cid, Port};

const PORT: Port = Port::new(77);

/// Runs `send` with one end of a connection and `receive` with the other, which may have maps.
fn pair(
    tune: impl Fn(EndpointBuilder) -> EndpointBuilder,
    send: impl FnOnce(Stream) + Send,
    receive: impl FnOnce(Stream, &Endpoint),
) {
    let daemon = TestDaemon::with(2, |config| {
        config.vms.iter_mut().for_each(|vm| vm.queue_size = 16384);
    });
    let attach = |index: usize, builder: EndpointBuilder| {
        let endpoint = builder.attach_device(&daemon.vms[index].socket);
        endpoint.unwrap()
    };
    let server = attach(0, Endpoint::builder());
    let client = attach(1, tune(Endpoint::builder().receive_buffers(16 << 10)));
    client.set_rx_map(true);
    let listener = server.listen(PORT, 4).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            send(stream);
        });
        let stream = client.connect(Address::new(Cid::new(3), PORT)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        receive(stream, &client);
    });
}

/// Calls `attempt` until it returns true: no packet was copied meanwhile.
fn undisturbed(mut attempt: impl FnMut() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !attempt() {
        assert!(Instant::now() < give_up, "packets always wait too long");
    }
}

/// Sends packets of these lengths in one batch.
fn send_packets(stream: &Stream, lens: &[usize]) {
    let mut batch = stream.batch();
    for (seed, len) in lens.iter().enumerate() {
        batch.write(&bytes(seed as u64, *len)).unwrap();
    }
}

fn wait_for_word(mut stream: &Stream) {
    let mut word = [0];
    stream.read_exact(&mut word).unwrap();
}

/// Waits until `len` bytes have arrived.
fn wait_for(stream: &Stream, len: usize) {
    stream.set_low_water(len as u32).unwrap();
    stream.wait_readable().unwrap();
    stream.set_low_water(1).unwrap();
}
