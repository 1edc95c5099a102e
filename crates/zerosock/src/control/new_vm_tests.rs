//! Unit tests of `new_vm`.

use std::io::IoSlice;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use zerosock_sys::account::Budget;

use super::*;
use crate::control::attach::AttachConfig;
use crate::control::config::HybridMessages;
use crate::lingering::{lingering_socket, without_waiting};

fn socket(kind: SocketType) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap()
}

/// A listener with a connection in its backlog that carries a descriptor on which close(2)
/// blocks.
fn listener(path: &Path, kind: SocketType) -> (OwnedFd, TcpStream) {
    let address = SocketAddrUnix::new(path).unwrap();
    let listener = socket(kind);
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    let program = socket(kind);
    rustix::net::connect(&program, &address).unwrap();
    let (fd, receiver) = lingering_socket();
    fd_passing::send(&program, &[IoSlice::new(b"x")], &[fd.as_fd()]).unwrap();
    (listener, receiver)
}

/// A VM with such listeners of all kinds, and the handle that lets them close.
fn new_vm(dir: &Path, account: Account) -> (NewVm, Vec<TcpStream>) {
    let of = |name: &str, kind| listener(&dir.join(name), kind);
    let (control, one) = of("control", SocketType::STREAM);
    let (streams, two) = of("streams", SocketType::STREAM);
    let (packets, three) = of("packets", SocketType::SEQPACKET);
    let vm = VmConfig {
        cid: Cid::new(3),
        listener: UnixListener::from(control),
        host: HostSide::Hybrid {
            path: dir.join("streams"),
            listener: UnixListener::from(streams),
            messages: Some(HybridMessages {
                path: dir.join("packets"),
                listener: packets,
            }),
        },
        buf_alloc: 1,
        queue_size: 1,
        groups: Vec::new(),
        require_sealed_memory: false,
        stopped_timeout: None,
        guest_endpoints: None,
        succession: None,
    };
    (NewVm::new(vm, account), vec![one, two, three])
}

#[test]
fn listeners_of_a_vm_that_is_not_added_are_closed_without_waiting_for_their_backlog() {
    let dir = tempfile::tempdir().unwrap();
    let account = Budget::unlimited().account();
    let (vm, _receivers) = new_vm(dir.path(), account);
    without_waiting(move || drop(vm));
}

#[test]
fn listeners_of_a_device_are_closed_without_waiting_for_their_backlog() {
    let dir = tempfile::tempdir().unwrap();
    let account = Budget::unlimited().account();
    let (mut vm, _receivers) = new_vm(dir.path(), account);
    let host = vm.take_host().unwrap();
    without_waiting(move || drop(host));
}

#[test]
fn the_attach_socket_is_closed_without_waiting_for_its_backlog() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, _receiver) = listener(&dir.path().join("s"), SocketType::SEQPACKET);
    let config = AttachConfig::new(listener);
    without_waiting(move || drop(config));
}
