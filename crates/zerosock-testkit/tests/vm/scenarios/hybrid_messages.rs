//! Messages between a stock guest and host programs, over SOCK_SEQPACKET Unix sockets: both sides
//! connect, and each message is one packet.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType,
};
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::calls::{self, Call, Kind};
use zerosock_testkit::protocol::{Command, Outcome, ShutdownDirection, Socket};

use crate::lab::{Lab, STEP, Vm, port};

/// Lengths around those of buffers (4 KiB to a guest) and of packets, and the longest.
const LENS: [usize; 11] = [
    1, 100, 4051, 4096, 4097, 5000, 65_535, 65_536, 65_537, 200_000, 262_144,
];

/// A SOCK_SEQPACKET socket of a host program.
struct Program(OwnedFd);

fn packets() -> OwnedFd {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    // Accepted sockets inherit them from their listener.
    sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(STEP)).unwrap();
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(STEP)).unwrap();
    sockopt::set_socket_send_buffer_size(&socket, 1 << 20).unwrap();
    socket
}

impl Program {
    /// A host program that listens for the guest at a port.
    fn listen(path: &Path, port: u32) -> Program {
        let mut name = path.as_os_str().to_owned();
        name.push(format!("_{port}"));
        let socket = packets();
        rustix::net::bind(&socket, &SocketAddrUnix::new(PathBuf::from(name)).unwrap()).unwrap();
        rustix::net::listen(&socket, 4).unwrap();
        Program(socket)
    }

    fn accept(&self) -> Program {
        let socket = rustix::net::accept_with(&self.0, SocketFlags::CLOEXEC);
        let socket = socket.expect("the guest's connection");
        sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(STEP)).unwrap();
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(STEP)).unwrap();
        sockopt::set_socket_send_buffer_size(&socket, 1 << 20).unwrap();
        Program(socket)
    }

    /// Connects to the guest: `None` without a listener there.
    fn call(path: &Path, port: u32) -> Option<Program> {
        let socket = packets();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        let program = Program(socket);
        program.send(format!("CONNECT {port}\n").as_bytes());
        let answer = program.recv();
        if answer.is_empty() {
            return None;
        }
        let answer = String::from_utf8(answer).unwrap();
        let answered = answer
            .strip_prefix("OK ")
            .and_then(|it| it.strip_suffix('\n'));
        let answered: Option<u32> = answered.and_then(|it| it.parse().ok());
        assert!(answered.is_some(), "{answer:?}");
        Some(program)
    }

    fn send(&self, message: &[u8]) {
        let mut none = SendAncillaryBuffer::default();
        let sent = rustix::net::sendmsg(
            &self.0,
            &[IoSlice::new(message)],
            &mut none,
            SendFlags::NOSIGNAL,
        );
        assert_eq!(sent, Ok(message.len()));
    }

    /// The next packet; empty at the end (Linux sends no empty ones).
    fn recv(&self) -> Vec<u8> {
        let mut out = vec![0; 300_000];
        match rustix::net::recv(&self.0, &mut out[..], RecvFlags::TRUNC) {
            Ok((_, len)) => {
                assert!(len <= out.len(), "{len}");
                out.truncate(len);
                out
            }
            Err(Errno::CONNRESET) => Vec::new(),
            Err(error) => panic!("{error}"),
        }
    }
}

fn path(vm: &Vm) -> &Path {
    let path = vm.endpoint.messages.as_deref();
    path.expect("a device that has a socket of packets")
}

fn call(vm: &Vm, call: Call) -> Outcome {
    let outcome = vm.run(Command::Call(call));
    assert_eq!(outcome.errno, None);
    outcome
}

fn socket(vm: &Vm) -> Socket {
    let kind = Kind::SeqPacket;
    call(vm, Call::Socket { kind }).socket.expect("a socket")
}

fn send(vm: &Vm, socket: Socket, seed: u64, len: usize) {
    let call = match seed % 2 {
        0 => Call::SendRecord { socket, seed, len },
        _ => Call::Send {
            socket,
            seed,
            len,
            now: false,
        },
    };
    let sent = vm.run(Command::Call(call));
    assert_eq!((sent.errno, sent.bytes), (None, len as u64));
}

fn receive(vm: &Vm, socket: Socket) -> Outcome {
    let flags = calls::RecvFlags {
        trunc: true,
        ..calls::RecvFlags::default()
    };
    let len = 300_000;
    vm.run(Command::Call(Call::Receive { socket, len, flags }))
}

#[track_caller]
fn received(vm: &Vm, socket: Socket, seed: u64, len: usize) {
    let got = receive(vm, socket);
    assert_eq!((got.errno, got.bytes), (None, len as u64));
    assert_eq!(got.sha256, Some(sha256(&Pattern::bytes(seed, len))));
}

/// The guest connects to a program.
pub(crate) fn guest_is_client(lab: &Lab) {
    let vm = &lab.a;
    let connect = || {
        let (socket, port, cid) = (socket(vm), port(), 2);
        let listener = Program::listen(path(vm), port);
        let connecting = vm.start(Command::Call(Call::Connect { socket, cid, port }));
        let program = listener.accept();
        assert_eq!(connecting.wait(STEP).expect("connected").errno, None);
        (socket, program)
    };
    exchange(vm, connect());
    too_long(vm, connect());
    // There is no listener.
    let (socket, port, cid) = (socket(vm), port(), 2);
    let refused = vm.run(Command::Call(Call::Connect { socket, cid, port }));
    assert_eq!(refused.errno.as_deref(), Some("ECONNRESET"));
}

/// A program connects to the guest.
pub(crate) fn guest_is_server(lab: &Lab) {
    let (vm, port) = (&lab.a, port());
    assert!(Program::call(path(vm), port).is_none(), "nobody listens");
    let listener = socket(vm);
    let bind = Call::Bind {
        socket: listener,
        cid: None,
        port: Some(port),
    };
    call(vm, bind);
    let (socket, backlog) = (listener, 4);
    call(vm, Call::Listen { socket, backlog });
    let connect = || {
        let timeout_ms = STEP.as_millis() as u32;
        let socket = listener;
        let accepting = vm.start(Command::Call(Call::Accept { socket, timeout_ms }));
        let program = Program::call(path(vm), port).expect("the guest listens");
        let accepted = accepting.wait(STEP).expect("accepted");
        assert_eq!(accepted.peer.map(|(cid, _)| cid), Some(2));
        (accepted.socket.expect("a connection"), program)
    };
    exchange(vm, connect());
    too_long(vm, connect());
    vm.close(listener);
}

/// Messages keep their boundaries and bytes, one by one and many at once; then the ends.
fn exchange(vm: &Vm, (socket, program): (Socket, Program)) {
    for (seed, len) in (1..).zip(LENS) {
        // The longest uses all the credit.
        thread::scope(|scope| {
            let reading = scope.spawn(|| program.recv());
            send(vm, socket, seed, len);
            let got = reading.join().unwrap();
            assert_eq!(got.len(), len);
            assert_eq!(sha256(&got), sha256(&Pattern::bytes(seed, len)));
            scope.spawn(|| program.send(&Pattern::bytes(seed + 100, len)));
            received(vm, socket, seed + 100, len);
        });
    }
    const MANY: u64 = 40;
    let len = |seed: u64| 1 + (seed * 7919 % 90_000) as usize;
    thread::scope(|scope| {
        scope.spawn(|| {
            for seed in 200..200 + MANY {
                program.send(&Pattern::bytes(seed, len(seed)));
            }
        });
        let reading = scope.spawn(|| {
            for seed in 300..300 + MANY {
                let got = program.recv();
                assert_eq!(got.len(), len(seed), "{seed}");
                assert_eq!(sha256(&got), sha256(&Pattern::bytes(seed, len(seed))));
            }
        });
        for n in 0..MANY {
            send(vm, socket, 300 + n, len(300 + n));
            if n % 2 == 1 {
                for seed in [199 + n, 200 + n] {
                    received(vm, socket, seed, len(seed));
                }
            }
        }
        reading.join().unwrap();
    });
    // An empty message is a message, and not the end.
    for message in [&b"a"[..], b"", b"b"] {
        program.send(message);
        assert_eq!(receive(vm, socket).bytes, message.len() as u64);
    }
    rustix::net::shutdown(&program.0, Shutdown::Write).unwrap();
    let end = receive(vm, socket);
    assert_eq!((end.errno, end.bytes), (None, 0));
    // The other direction continues.
    send(vm, socket, 7, 70_000);
    assert_eq!(sha256(&program.recv()), sha256(&Pattern::bytes(7, 70_000)));
    let how = ShutdownDirection::Send;
    vm.run(Command::Shutdown { socket, how });
    assert_eq!(program.recv(), b"", "the end");
    vm.close(socket);
}

/// A message that the guest can never receive ends this connection for both sides, and no other.
fn too_long(vm: &Vm, (socket, program): (Socket, Program)) {
    program.send(b"short");
    assert_eq!(receive(vm, socket).bytes, 5);
    program.send(&[1; 262_145]);
    assert_eq!(program.recv(), b"", "over");
    let end = receive(vm, socket);
    // An end, or an error, depending on the release of Linux.
    assert!(end.bytes == 0, "{end:?}");
    vm.close(socket);
}

/// `zerosock nc --seqpacket` in the guest, over kernel sockets: an empty message is not the end
/// there either.
pub(crate) fn netcat_in_the_guest(lab: &Lab) {
    let (vm, out) = (&lab.a, port());
    let listener = Program::listen(path(vm), out);
    let to_host = format!("vsock:2:{out}");
    let argv = ["/bin/zerosock", "nc", "--seqpacket", "-d", &to_host];
    let running = vm.start(Command::Run {
        argv: argv.map(str::to_owned).to_vec(),
    });
    let program = listener.accept();
    let long = "x".repeat(10_000);
    for message in ["first, ", "", "", "second, ", &long, "", ".", ""] {
        program.send(message.as_bytes());
    }
    drop(program);
    let said = running.wait(STEP).expect("its end");
    let text = said.text.unwrap_or_default();
    assert_eq!(said.bytes, 0, "{text}");
    assert!(text == format!("first, second, {long}."), "{text}");

    // In the other direction, one read gives one message.
    let back = port();
    let script =
        format!("/bin/busybox echo -n asked | /bin/zerosock nc --seqpacket vsock-listen:{back}");
    let argv = ["/bin/busybox", "sh", "-c", &script];
    let running = vm.start(Command::Run {
        argv: argv.map(str::to_owned).to_vec(),
    });
    let give_up = Instant::now() + STEP;
    let program = loop {
        match Program::call(path(vm), back) {
            Some(program) => break program,
            None => assert!(Instant::now() < give_up, "nobody listens in the guest"),
        }
    };
    assert_eq!(program.recv(), b"asked");
    assert_eq!(program.recv(), b"", "the end of its input");
    program.send(b"answered");
    drop(program);
    let said = running.wait(STEP).expect("its end");
    assert_eq!((said.bytes, said.text.as_deref()), (0, Some("answered")));
}
