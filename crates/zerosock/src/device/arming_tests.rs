//! Before a worker sleeps it asks the guest for kicks. What the guest did before it saw that brings
//! no kick: the device has to find it itself, and keep the worker awake.

use zerosock_proto::wire::vsock::Op;
use zerosock_proto::{Address, Cid, Port};

use super::bare;
use super::ready_tests::Lab;

#[test]
fn arming_finds_a_packet_that_brought_no_kick() {
    let mut lab = Lab::new();
    let mut guest = bare::start(&mut lab.device);
    assert!(!lab.device.ask_for_kicks(), "nothing is there");
    let to = Address::new(Cid::HOST, Port::new(9));
    guest.send(1, to, Op::Request, 0);
    assert!(lab.device.ask_for_kicks(), "a packet is there");
    let (device, mut cx) = lab.lend();
    device.turn(&mut cx);
    assert!(!lab.device.ask_for_kicks(), "it was taken");
}

#[test]
fn arming_finds_buffers_that_brought_no_kick() {
    let mut lab = Lab::new();
    let _guest = bare::start(&mut lab.device);
    assert!(!lab.device.ask_for_kicks(), "there are enough");
    lab.device.starved = true;
    assert!(lab.device.ask_for_kicks(), "there are some again");
}
