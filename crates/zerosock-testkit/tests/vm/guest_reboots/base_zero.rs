//! A VM that is stopped where the base of a queue is 0, as after a reset: its endpoints end, whether it goes on or reboots.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::json;
use zerosock_cli::vm::hybrid;
use zerosock_ring::Extent;
use zerosock_testkit::protocol::{Command, Socket, Source};

use super::{Lab, assert_same, bytes};
use crate::lab::{STEP, deadlines};

const PORT: u32 = 4325;
/// The queue to which the guest's driver adds packets.
const TRANSMIT: u16 = 1;
/// The guest may send a packet of its own while the others are counted.
const ATTEMPTS: usize = 5;

/// A connection of the guest's kernel with the host.
struct KernelConnection {
    guest: Socket,
    host: UnixStream,
}

impl KernelConnection {
    fn new(lab: &Lab) -> KernelConnection {
        let listener = hybrid::listen(&lab.uds, PORT).expect("a port of the host");
        let connect = Command::Connect { cid: 2, port: PORT };
        let connecting = lab.machine.guest.remote.start(connect);
        let host = hybrid::accept(&listener, STEP).expect("a connection");
        deadlines(&host);
        let guest = connecting.socket(STEP).expect("a connection");
        KernelConnection { guest, host }
    }

    /// Sends so many packets of a byte, and waits until they have arrived.
    fn send(&mut self, lab: &Lab, packets: u32) {
        let send = Command::Send {
            socket: self.guest,
            source: Source::Pattern {
                seed: 1,
                len: packets.into(),
            },
            chunks: vec![1],
        };
        let sending = lab.machine.guest.remote.start(send);
        let mut all = vec![0; packets as usize];
        self.host.read_exact(&mut all).expect("all packets");
        let outcome = sending.wait(STEP).expect("an outcome");
        assert_eq!((outcome.bytes, outcome.errno), (packets.into(), None));
    }

    /// Bytes cross both ways.
    fn exchange(&mut self, lab: &Lab) {
        self.send(lab, 1);
        self.host.write_all(b"x").expect("a receiver");
        let receive = Command::Receive {
            socket: self.guest,
            limit: Some(1),
            keep: false,
            acknowledge: false,
        };
        let outcome = lab.machine.guest.remote.run(receive, STEP);
        assert_eq!(outcome.expect("an outcome").bytes, 1);
    }
}

/// The base that the daemon has answered for a queue of the paused VM.
fn base(lab: &mut Lab, queue: u16) -> u16 {
    let devices = lab.monitor.ask("x-query-virtio", json!({}));
    let mut devices = devices.as_array().expect("a list").iter();
    let device = devices.find(|it| it["name"].as_str().is_some_and(|it| it.contains("vsock")));
    let path = &device.expect("a vsock device")["path"];
    let arguments = json!({"path": path, "queue": queue});
    let status = lab.monitor.ask("x-query-virtio-queue-status", arguments);
    let base = status["last-avail-idx"].as_u64();
    let base = base.unwrap_or_else(|| panic!("no index: {status}"));
    base.try_into().expect("an index")
}

/// Pauses the VM where the base of its transmit queue is 0. Its programs stand still.
fn pause_at_zero(lab: &mut Lab) -> KernelConnection {
    lab.signal_clients("STOP");
    let mut connection = KernelConnection::new(lab);
    for _ in 0..ATTEMPTS {
        lab.monitor.ask("stop", json!({}));
        let base = base(lab, TRANSMIT);
        if base == 0 {
            return connection;
        }
        lab.monitor.ask("cont", json!({}));
        connection.send(lab, (1 << 16) - u32::from(base));
    }
    panic!("the guest sends packets on its own");
}

/// It goes on: what the kernel has goes on, the endpoints do not.
pub(super) fn goes_on(lab: &mut Lab) {
    lab.wait_for_traffic();
    let extents = lab.extents();
    let mut connection = pause_at_zero(lab);
    let view = lab.machine.view(&extents);
    let before = bytes(&view);
    lab.monitor.ask("cont", json!({}));
    connection.exchange(lab);
    lab.assert_endpoints_ended();
    assert_same(&before, &bytes(&view), "started at 0");
    lab.signal_clients("CONT");
    lab.wait_for_traffic();
    lab.check_patterns();
}

/// It is reset. Returns where its endpoints were.
pub(super) fn reboots(lab: &mut Lab) -> Vec<Extent> {
    lab.wait_for_traffic();
    let extents = lab.extents();
    let _connection = pause_at_zero(lab);
    lab.assert_still(&extents, "paused at 0");
    lab.monitor.ask("system_reset", json!({}));
    lab.assert_still(&extents, "reset at 0");
    lab.monitor.ask("cont", json!({}));
    lab.wait_for_boot();
    extents
}
