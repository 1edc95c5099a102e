use super::*;
use crate::device::Device;
use crate::device::lab::DeviceFixture;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use zerosock_virtio::poller::{Events, Poller};

/// A program that has sent these bytes, and whose handshake has begun.
fn begin(device: &mut Device, bytes: &[u8], cx: &mut Context<'_>) -> UnixStream {
    let (ours, mut program) = UnixStream::pair().unwrap();
    let permit = device.account.take_descriptors(1).unwrap();
    program.write_all(bytes).unwrap();
    let socket = HostSocket::accepted(ours.into(), permit);
    device
        .bridges_with(cx)
        .begin_handshake(socket, SocketType::Stream);
    program
}

/// Handles the events that are there.
fn dispatch(device: &mut Device, cx: &mut Context<'_>) {
    let mut events = Events::default();
    events.wait(cx.poller, Some(Duration::ZERO)).unwrap();
    for (token, readiness) in Poller::interpret(&events) {
        device
            .bridges_with(cx)
            .handshake_ready(token.key, readiness);
    }
}

#[test]
fn an_end_of_file_behind_part_of_a_line_ends_the_handshake() {
    for half in [false, true] {
        let mut lab = DeviceFixture::new();
        let (device, mut cx) = lab.lend();
        let program = begin(device, b"CONN", &mut cx);
        dispatch(device, &mut cx);
        assert_eq!(device.handshakes.len(), 1, "the program may send the rest");
        let _half_closed = half.then(|| {
            program.shutdown(std::net::Shutdown::Write).unwrap();
            program.try_clone().unwrap()
        });
        drop(program);
        dispatch(device, &mut cx);
        assert_eq!(device.handshakes.len(), 0, "half: {half}");
        assert_eq!(cx.shared.counters.bad_handshakes.get(), 1);
    }
}

#[test]
fn a_program_may_shut_down_sending_behind_its_line() {
    let mut lab = DeviceFixture::new();
    let (device, mut cx) = lab.lend();
    let mut program = begin(device, b"CONN", &mut cx);
    program.write_all(b"ECT 1\nall").unwrap();
    program.shutdown(std::net::Shutdown::Write).unwrap();
    dispatch(device, &mut cx);
    // The guest was asked for the connection: no driver runs here.
    assert_eq!(cx.shared.counters.bad_handshakes.get(), 0);
    assert_eq!(cx.shared.counters.conns_refused.get(), 1);
}

#[test]
fn a_full_table_of_handshakes_refuses_and_counts() {
    let mut lab = DeviceFixture::new();
    let (device, mut cx) = lab.lend();
    let _first = begin(device, b"C", &mut cx);
    let _second = begin(device, b"C", &mut cx);
    assert_eq!(device.handshakes.len(), cx.shared.limits.handshakes);
    assert_eq!(cx.shared.counters.refused_by_limit.get(), 1);
}

#[test]
fn refused_handshake_leaves_the_poller_before_it_is_closed() {
    let mut lab = DeviceFixture::new();
    let (device, mut cx) = lab.lend();
    let (ours, mut program) = UnixStream::pair().unwrap();
    // As if the reaper had not closed it yet.
    let open = ours.try_clone().unwrap();
    let permit = device.account.take_descriptors(1).unwrap();
    let socket = HostSocket::accepted(ours.into(), permit);
    assert!(socket.is_closed_later());
    program.write_all(b"CONNECT").unwrap();
    device
        .bridges_with(&mut cx)
        .begin_handshake(socket, SocketType::Stream);
    program.write_all(b" 1\n").unwrap();
    dispatch(device, &mut cx);
    assert_eq!(cx.shared.counters.conns_refused.get(), 1);
    program.write_all(b"x").unwrap();
    let mut events = Events::default();
    events.wait(cx.poller, Some(Duration::ZERO)).unwrap();
    let sources: Vec<_> = Poller::interpret(&events)
        .map(|(source, _)| source)
        .collect();
    assert!(sources.is_empty(), "{sources:?}");
    drop(open);
}
