//! A port on one end of a veth pair.

use super::super::test_veth::{DEADLINE, VethPair, frame, with_pair};
use super::*;

/// A port as the uplink of a switch, and what it counts.
struct Uplink {
    port: XdpPort,
    pair: VethPair,
    tally: NetStats,
    begun: std::time::Instant,
}

impl Uplink {
    fn turn(&mut self, fills: bool) {
        let nanos = self.begun.elapsed().as_nanos() as u64;
        let now = Instant::from_nanos(nanos + 1);
        let flushed = self.port.flush(now, fills, &mut self.tally);
        assert!(flushed.is_ok(), "{flushed:?}");
        assert!(self.begun.elapsed() < DEADLINE, "not within the deadline");
        std::thread::sleep(Duration::from_millis(1));
    }

    /// Sends frames until one is received.
    fn receive(&mut self, seed: u8) {
        let mut bytes = [0; 2048];
        loop {
            self.pair.send(seed);
            self.turn(true);
            match self.port.receive(&[], &mut bytes) {
                Ok(len) if bytes[..len] == frame(seed) => return,
                result => assert!(
                    matches!(result, Ok(_) | Err(FrameError::NotNow)),
                    "{result:?}"
                ),
            }
        }
    }
}

/// A frame in a chunk that the port has not posted: of a driver with an error, or of another process.
#[test]
fn socket_that_returns_an_unknown_chunk_is_replaced() {
    with_pair("socket_that_returns_an_unknown_chunk", |pair| {
        let mut uplink = Uplink {
            port: XdpPort::new(&pair.near, 0, false).unwrap(),
            pair,
            tally: NetStats::default(),
            begun: std::time::Instant::now(),
        };
        uplink.port.set_active(true);
        while uplink.port.socket.is_none() {
            uplink.turn(false);
        }
        let socket = uplink.port.socket.as_mut().unwrap();
        let unknown = socket.umem_mut().take_chunk().unwrap();
        assert!(socket.post(unknown));
        assert!(socket.wake().unwrap());
        // It goes there; with the next turn there are other chunks.
        uplink.pair.send(0);
        uplink.receive(1);
        assert!(uplink.tally.rx_dropped >= 1);
        uplink.receive(2);
    });
}
