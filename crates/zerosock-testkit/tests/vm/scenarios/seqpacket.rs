//! Messages (SOCK_SEQPACKET) of a stock guest: with a process at the same device, as client and as
//! server.

use std::path::PathBuf;

use zerosock::vsock::{Endpoint, SeqPacket};
use zerosock::{Address, Cid, Port};
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::calls::{Call, Kind, RecvFlags};
use zerosock_testkit::protocol::{Command, Outcome, Socket};

use crate::lab::{Lab, STEP, Vm, port};

/// Lengths of messages: around those of packets and pages, and the longest.
const LENS: [usize; 9] = [1, 100, 4096, 5000, 65_535, 65_536, 65_537, 200_000, 262_144];

fn call(vm: &Vm, call: Call) -> Outcome {
    let outcome = vm.run(Command::Call(call));
    assert_eq!(outcome.errno, None);
    outcome
}

fn process(lab: &Lab) -> Endpoint {
    let path: PathBuf = lab.process.vhost.clone();
    Endpoint::builder()
        .attach_device(path)
        .expect("a place at the device")
}

fn socket(vm: &Vm) -> Socket {
    let kind = Kind::SeqPacket;
    let made = call(vm, Call::Socket { kind });
    made.socket.expect("a socket")
}

fn receive(vm: &Vm, socket: Socket, len: usize) -> Outcome {
    let flags = RecvFlags {
        trunc: true,
        ..RecvFlags::default()
    };
    call(vm, Call::Receive { socket, len, flags })
}

/// The guest connects.
pub(crate) fn guest_is_client(lab: &Lab) {
    let (vm, process, port) = (&lab.a, process(lab), port());
    let listener = process.listen_seqpacket(Port::new(port), 4).unwrap();
    let socket = socket(vm);
    let cid = process.cid().get();
    let connecting = vm.start(Command::Call(Call::Connect { socket, cid, port }));
    let (ours, peer) = listener.accept_timeout(STEP).expect("the guest");
    assert_eq!(peer.cid.get(), vm.endpoint.cid);
    assert_eq!(connecting.wait(STEP).expect("connected").errno, None);
    exchange(vm, socket, ours);
}

/// The guest listens.
pub(crate) fn guest_is_server(lab: &Lab) {
    let (vm, process, port) = (&lab.a, process(lab), port());
    let listener = socket(vm);
    let bound = Some(port);
    let socket = listener;
    call(
        vm,
        Call::Bind {
            socket,
            cid: None,
            port: bound,
        },
    );
    call(vm, Call::Listen { socket, backlog: 4 });
    let to = Address::new(Cid::new(vm.endpoint.cid), Port::new(port));
    let ours = process.connect_seqpacket(to).expect("the guest");
    let timeout_ms = STEP.as_millis() as u32;
    let socket = listener;
    let accepted = call(vm, Call::Accept { socket, timeout_ms });
    exchange(vm, accepted.socket.expect("a connection"), ours);
    vm.close(listener);
    // A stream is refused there.
    assert!(process.connect(to).is_err());
}

/// Messages in both directions keep their boundaries and bytes.
fn exchange(vm: &Vm, socket: Socket, ours: SeqPacket) {
    ours.set_read_timeout(Some(STEP)).unwrap();
    ours.set_write_timeout(Some(STEP)).unwrap();
    let mut out = vec![0; 262_144];
    for (seed, len) in (1..).zip(LENS) {
        let record = seed % 2 == 0;
        let sending = match record {
            true => Call::SendRecord { socket, seed, len },
            false => {
                let now = false;
                Call::Send {
                    socket,
                    seed,
                    len,
                    now,
                }
            }
        };
        let sending = vm.start(Command::Call(sending));
        let got = ours.recv(&mut out).unwrap().expect("a message");
        assert_eq!((got.len, got.end_of_record), (len, record));
        assert!(out[..len] == Pattern::bytes(seed, len)[..], "other bytes");
        assert_eq!(sending.wait(STEP).expect("sent").bytes, len as u64);

        let answer = Pattern::bytes(seed + 100, len);
        ours.send(&answer).unwrap();
        let got = receive(vm, socket, 300_000);
        assert_eq!(got.bytes, len as u64);
        assert_eq!(got.sha256, Some(sha256(&answer)));
    }
    // Several waiting messages stay separate; bytes that do not fit are discarded, and the length
    // is reported.
    for len in [5000, 7, 0, 9] {
        ours.send(&Pattern::bytes(1, len)).unwrap();
    }
    let got = receive(vm, socket, 10);
    assert_eq!(got.bytes, 5000);
    assert_eq!(got.sha256, Some(sha256(&Pattern::bytes(1, 10))));
    for len in [7, 0, 9] {
        assert_eq!(receive(vm, socket, 100).bytes, len);
    }
    // EMSGSIZE on either side; nothing was sent.
    let (seed, len, now) = (1, 262_145, false);
    let refused = vm.run(Command::Call(Call::Send {
        socket,
        seed,
        len,
        now,
    }));
    // Linux before 6.2 reports every transport error as ENOMEM.
    let said = refused.errno.as_deref();
    assert!(matches!(said, Some("EMSGSIZE" | "ENOMEM")), "{said:?}");
    assert!(ours.send(&Pattern::bytes(1, 262_145)).is_err());
    let len = 3;
    call(
        vm,
        Call::Send {
            socket,
            seed,
            len,
            now,
        },
    );
    assert_eq!(ours.recv(&mut out).unwrap().expect("a message").len, 3);
    vm.close(socket);
    assert_eq!(ours.recv(&mut out).unwrap(), None, "the end");
}
