//! A stand-in for the agent of a guest and the daemon of its host: it gives programs memory and a doorbell, and a host
//! of the test runs the device on that memory.
//!
//! To the host it is the front-end of a VM. Wake-ups pass between the doorbell and eventfds.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{read, write};
use rustix::net::{RecvFlags, accept, recv};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use zerosock::Cid;
use zerosock::attach::codec::{
    Answer, MAX_REQUEST, Request, VERSION, decode_request, encode_answer,
};
use zerosock::attach::{self, Start, Status};
use zerosock::driver::{FEATURES, Frontend, VringAddr};
use zerosock_ring::{DriverLayout, RegionConfig};
use zerosock_sys::{fd_passing, memfd};

use crate::common::PATIENCE;

pub(super) struct Agent {
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Agent {
    /// Gives one program the device of the VM with CID 3 at this vhost-user socket. `change` changes the answer to the
    /// start.
    pub(super) fn new(vm: PathBuf, change: impl FnOnce(&mut Answer) + Send + 'static) -> Agent {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attach.sock");
        let listener = attach::listen(&path).unwrap();
        rustix::io::ioctl_fionbio(&listener, false).unwrap();
        let serve = move || serve(&accept(&listener).unwrap(), &vm, change);
        Agent {
            path,
            thread: Some(thread::spawn(serve)),
            _dir: dir,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until the program has gone.
    pub(super) fn join(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

fn request(client: &OwnedFd) -> Request {
    let mut bytes = [0; MAX_REQUEST];
    let (len, _) = recv(client, &mut bytes, RecvFlags::empty()).unwrap();
    decode_request(&bytes[..len]).unwrap()
}

fn answer(client: &OwnedFd, answer: &Answer, fds: &[impl AsFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let bytes = encode_answer(answer);
    fd_passing::send(client, &[IoSlice::new(&bytes)], &fds).unwrap();
}

fn serve(client: &OwnedFd, vm: &Path, change: impl FnOnce(&mut Answer)) {
    let Request::AttachMemory(_, len) = request(client) else {
        panic!("a request that takes no memory");
    };
    let mut frontend = Frontend::connect(vm, PATIENCE).unwrap();
    let memory = memfd::create("agent", len, true).unwrap();
    let (doorbell, theirs) = UnixStream::pair().unwrap();
    let granted = Answer {
        cid: Cid::new(3),
        host: Cid::HOST,
        features: FEATURES,
        memory: len,
        ..Answer::refusal(Status::Ok, VERSION)
    };
    answer(client, &granted, &[memory.as_fd(), theirs.as_fd()]);
    drop(theirs);
    let Request::Start(start) = request(client) else {
        panic!("no start");
    };
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let [kick, call] = [(); 2].map(|()| eventfd(0, flags).unwrap());
    start_device(&mut frontend, &memory, len, &start, [&kick, &call]);
    let mut started = Answer {
        features: start.features,
        ..Answer::refusal(Status::Ok, VERSION)
    };
    change(&mut started);
    answer(client, &started, &[] as &[OwnedFd]);
    relay(client, &doorbell, &kick, &call);
}

fn start_device(
    frontend: &mut Frontend,
    memory: &OwnedFd,
    len: u64,
    start: &Start,
    [kick, call]: [&OwnedFd; 2],
) {
    assert_eq!(frontend.get_features().unwrap() & FEATURES, FEATURES);
    let protocol = VhostUserProtocolFeatures::REPLY_ACK | VhostUserProtocolFeatures::CONFIG;
    frontend.negotiate(start.features, protocol).unwrap();
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len,
        fd_offset: 0,
    };
    frontend.set_mem_table(&[(memory.as_fd(), region)]).unwrap();
    for (index, ring) in (0..).zip(start.rings) {
        let DriverLayout {
            desc, avail, used, ..
        } = DriverLayout::at(ring, start.queue_size);
        frontend.set_vring_num(index, start.queue_size).unwrap();
        frontend.set_vring_base(index, 0).unwrap();
        let addr = VringAddr { desc, avail, used };
        frontend.set_vring_addr(index, addr).unwrap();
        frontend.set_vring_call(index, Some(call.as_fd())).unwrap();
        frontend.set_vring_kick(index, Some(kick.as_fd())).unwrap();
    }
    for index in 0..3 {
        frontend.set_vring_enable(index, true).unwrap();
    }
    frontend.sync().unwrap();
}

/// Passes wake-ups on until the program closes its connection or its doorbell.
fn relay(client: &OwnedFd, doorbell: &UnixStream, kick: &OwnedFd, call: &OwnedFd) {
    loop {
        let mut fds = [
            PollFd::new(client, PollFlags::IN),
            PollFd::new(doorbell, PollFlags::IN),
            PollFd::new(call, PollFlags::IN),
        ];
        poll(&mut fds, None).unwrap();
        let [gone, rung, called] = fds.map(|fd| !fd.revents().is_empty());
        if gone || (rung && !matches!(read(doorbell, &mut [0; 64]), Ok(1..))) {
            return;
        }
        if rung {
            write(kick, &1u64.to_ne_bytes()).unwrap();
        }
        if called {
            let _ = read(call, &mut [0; 8]);
            let _ = rustix::net::send(doorbell, &[0], rustix::net::SendFlags::NOSIGNAL);
        }
    }
}
