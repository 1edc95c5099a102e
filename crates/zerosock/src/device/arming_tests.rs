//! Enabling kicks before a worker sleeps. For chains that the guest posts before it sees that kicks
//! are enabled it sends no kick: the device has to find them itself and keep the worker awake.

use zerosock_proto::wire::vsock::Op;
use zerosock_proto::{Address, Cid, Port};
use zerosock_virtio::device::WorkerDevice;

use super::lab::DeviceFixture;
use super::test_guest;

#[test]
fn enabling_kicks_finds_a_packet_posted_without_a_kick() {
    let mut lab = DeviceFixture::new();
    let mut guest = test_guest::start(&mut lab.device);
    assert!(!lab.device.enable_kicks(), "no packet is posted");
    let to = Address::new(Cid::HOST, Port::new(9));
    guest.send(1, to, Op::Request, 0);
    assert!(lab.device.enable_kicks(), "a packet is posted");
    let (device, mut cx) = lab.lend();
    device.turn(&mut cx);
    assert!(!lab.device.enable_kicks(), "the packet was received");
}

#[test]
fn enabling_kicks_finds_buffers_posted_without_a_kick() {
    let mut lab = DeviceFixture::new();
    let _guest = test_guest::start(&mut lab.device);
    assert!(!lab.device.enable_kicks(), "no buffer is needed");
    lab.device.starved = true;
    assert!(lab.device.enable_kicks(), "buffers are posted");
}
