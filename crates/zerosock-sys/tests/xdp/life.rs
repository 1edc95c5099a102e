//! Sockets and interfaces that come and go.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::net::{SendFlags, send};
use zerosock_sys::bpf::drop_bpf_capabilities;
use zerosock_sys::network;
use zerosock_sys::xdp::{
    AttachMode, InterfaceOptions, LinkWatch, Registered, Task, Umem, XdpError, XdpFrame,
    XdpInterface, XdpSocket,
};

use super::support::{
    DEADLINE, Guest, Link, SIZES, frame, isolated, isolated_each, isolated_with, name, open_near,
    take, wait_readable, wait_until,
};

fn registered() -> Registered {
    Registered::create(Umem::map(None, 64).unwrap(), SIZES).unwrap()
}

fn post(socket: &mut XdpSocket, chunks: usize) {
    for _ in 0..chunks {
        let chunk = socket.umem_mut().take_chunk().unwrap();
        assert!(socket.post(chunk));
    }
    socket.wake().unwrap();
}

#[test]
fn queue_is_free_again_when_its_socket_is_closed() {
    isolated_each("queue_is_free_again_when_its_socket_is_closed", |options| {
        let link = Link::open(options);
        let mut first = link.bind(Umem::map(None, 64).unwrap());
        post(&mut first, 32);
        let error = registered().bind(&link.interface, 0, Duration::ZERO);
        assert!(
            matches!(error, Err(XdpError::Busy { queue: 0 })),
            "{error:?}"
        );
        for mark in 0..5 {
            let mut closing = first.close();
            wait_until("close", || closing.is_done());
            let mut next = registered().bind(&link.interface, 0, DEADLINE).unwrap();
            post(&mut next, 1);
            link.send(&frame(100, mark));
            take(&mut next);
            first = next;
        }
        // Without waiting for the close.
        drop(first.close());
        registered().bind(&link.interface, 0, DEADLINE).unwrap();
    });
}

#[test]
fn memory_of_a_closed_socket_is_not_written() {
    isolated_each("memory_of_a_closed_socket_is_not_written", |options| {
        let link = Link::open(options);
        let guest = Guest::small();
        let mut socket = link.bind(guest.umem(0));
        for index in 0..20 {
            let chunk = socket.chunk_for(&guest.pieces(2048 * (index + 1), 1536), 12);
            assert!(socket.post(chunk.unwrap()));
        }
        socket.wake().unwrap();
        let mut closing = socket.close();
        wait_until("close", || closing.is_done());
        guest.fill();
        let before = guest.contents();
        for mark in 0..50 {
            link.send(&frame(1000, mark));
        }
        let mut next = registered().bind(&link.interface, 0, DEADLINE).unwrap();
        post(&mut next, 1);
        link.send(&frame(1000, 1));
        take(&mut next);
        assert!(guest.contents() == before);
    });
}

/// In the driver only: behind it, all frames of a veth interface have queue 0.
#[test]
fn two_queues_have_sockets_of_their_own() {
    isolated_with(2, "two_queues_have_sockets_of_their_own", || {
        let link = Link::open(InterfaceOptions::default());
        assert_eq!(link.interface.attached(), AttachMode::Driver);
        let mut sockets: Vec<XdpSocket> = (0..2)
            .map(|queue| {
                let mut socket = registered().bind(&link.interface, queue, DEADLINE).unwrap();
                assert_eq!(socket.queue(), queue);
                post(&mut socket, 50);
                socket
            })
            .collect();
        let error = registered().bind(&link.interface, 2, Duration::ZERO);
        let refused = matches!(error, Err(XdpError::NoQueue { queue: 2 }));
        assert!(refused, "{error:?}");
        // The other end chooses a queue by the flow: IPv4, UDP.
        let mut packet = frame(60, 0);
        packet[12..14].copy_from_slice(&[8, 0]);
        packet[14..34].copy_from_slice(&[
            0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        for port in 0..40_u8 {
            packet[34..42].copy_from_slice(&[40, port, 40, port, 0, 26, 0, 0]);
            link.send(&packet);
        }
        let mut received = [0, 0];
        wait_until("all frames", || {
            for (socket, count) in sockets.iter_mut().zip(&mut received) {
                while socket.receive().unwrap().is_some() {
                    *count += 1;
                }
            }
            received[0] + received[1] == 40
        });
        assert!(received[0] > 0 && received[1] > 0, "{received:?}");
    });
}

#[test]
fn removed_interface_is_reported() {
    isolated_each("removed_interface_is_reported", |options| {
        let link = Link::open(options);
        let guest = Guest::small();
        let mut socket = link.bind(guest.umem(4));
        post(&mut socket, 1);
        assert!(socket.check().is_ok());
        let watch = LinkWatch::new().unwrap();
        assert!(link.interface.is_present());
        network::remove_interface(&name("near")).unwrap();
        wait_readable(&watch, DEADLINE);
        assert!(watch.changed() && !watch.changed());
        assert!(!link.interface.is_present());
        assert!(matches!(socket.check(), Err(XdpError::InterfaceRemoved)));
        socket.send(&XdpFrame::of_one(0, 100)).unwrap();
        let error = socket.wake();
        assert!(
            matches!(error, Err(XdpError::InterfaceRemoved)),
            "{error:?}"
        );
        let error = registered().bind(&link.interface, 0, Duration::ZERO);
        assert!(
            matches!(error, Err(XdpError::InterfaceRemoved)),
            "{error:?}"
        );
        let error = XdpInterface::open(&name("near"), InterfaceOptions::default());
        assert!(matches!(error, Err(XdpError::NoInterface)), "{error:?}");
    });
}

#[test]
fn frames_wait_while_the_interface_is_down() {
    isolated_each("frames_wait_while_the_interface_is_down", |options| {
        let link = Link::open(options);
        let guest = Guest::small();
        let mut socket = link.bind(guest.umem(0));
        name("near").bring_down().unwrap();
        let sent = frame(100, 1);
        guest.write(0, &sent);
        socket.send(&XdpFrame::of_one(0, 100)).unwrap();
        let error = socket.wake();
        assert!(matches!(error, Err(XdpError::Down)), "{error:?}");
        assert_eq!(socket.completed(), 0);
        name("near").bring_up().unwrap();
        wait_until("completion", || {
            socket.wake().unwrap();
            socket.completed() == 1
        });
        let bound = registered().bind(&link.interface, 1, DEADLINE);
        drop(bound.unwrap());
    });
}

#[test]
fn program_is_detached_with_its_interface() {
    isolated("program_is_detached_with_its_interface", || {
        let first = open_near(InterfaceOptions::default()).unwrap();
        assert_eq!(first.attached(), AttachMode::Driver);
        let error = XdpInterface::open(&name("near"), InterfaceOptions::default());
        assert!(matches!(error, Err(XdpError::Attached)), "{error:?}");
        drop(first);
        let generic = InterfaceOptions {
            attach: Some(AttachMode::Generic),
            ..InterfaceOptions::default()
        };
        let second = open_near(generic).unwrap();
        assert_eq!(second.attached(), AttachMode::Generic);
        drop(second);
        // A driver that refuses: the frames of the other end would be too long.
        super::support::ip("link set far mtu 9000");
        let third = open_near(InterfaceOptions::default()).unwrap();
        assert_eq!(third.attached(), AttachMode::Generic);
    });
}

/// Opening comes first, then the capabilities are dropped, then sockets come and go.
#[test]
fn sockets_need_no_capability_of_bpf() {
    isolated("sockets_need_no_capability_of_bpf", || {
        let link = Link::open(InterfaceOptions::default());
        drop_bpf_capabilities().unwrap();
        let error = XdpInterface::open(&name("far"), InterfaceOptions::default()).unwrap_err();
        assert!(error.to_string().contains("CAP_BPF"), "{error}");
        let mut socket = link.bind(Umem::map(None, 8).unwrap());
        post(&mut socket, 1);
        link.send(&frame(100, 1));
        take(&mut socket);
    });
}

#[test]
fn memory_is_registered_while_frames_are_received() {
    isolated("memory_is_registered_while_frames_are_received", || {
        let link = Link::open(InterfaceOptions::default());
        let mut socket = link.bind(Umem::map(None, 64).unwrap());
        let guest = Guest::new(&[64 << 20]);
        let umem = guest.umem(64);
        let mut task = Task::start("register", move || Registered::create(umem, SIZES)).unwrap();
        let next = loop {
            if let Some(result) = task.take() {
                break result.unwrap();
            }
            post(&mut socket, 1);
            link.send(&frame(100, 1));
            let received = take(&mut socket);
            socket.umem_mut().return_chunk(received.chunk);
        };
        let interface = Arc::new(link);
        let closing = socket.close();
        let other = Arc::clone(&interface);
        let mut task = Task::start("bind", move || next.bind(&other.interface, 0, DEADLINE));
        let task = task.as_mut().unwrap();
        wait_readable(&*task, DEADLINE);
        let mut socket = task.take().unwrap().unwrap();
        drop(closing);
        post(&mut socket, 1);
        interface.send(&frame(100, 1));
        take(&mut socket);
    });
}

/// Several guests of one process, each with a thread: the program of the interface is theirs together.
#[test]
fn socket_moves_to_another_thread() {
    isolated("socket_moves_to_another_thread", || {
        let link = Link::open(InterfaceOptions::default());
        let mut socket = link.bind(Umem::map(None, 8).unwrap());
        let thread = thread::spawn(move || {
            post(&mut socket, 1);
            (take(&mut socket), socket)
        });
        let bytes = [&[0; 10][..], &frame(100, 1)].concat();
        wait_until("the frame", || {
            send(&link.far, &bytes, SendFlags::empty()).unwrap();
            thread.is_finished()
        });
        thread.join().unwrap();
    });
}
