//! User-mode Linux as the guest: another front-end than QEMU's, Linux's own `virtio_uml`.
//!
//! When its daemon ends, `virtio_uml` takes the device away from the guest for good, as if it
//! had been unplugged: it connects only at boot. What a guest sees that does reconnect
//! (TRANSPORT_RESET, then new connections) is shown with our own driver half, in
//! crates/zerosock/tests/lifecycle.rs.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use tempfile::TempDir;
use zerosock_cli::vm::hybrid;
use zerosock_cli::vm::initramfs::Builder;
use zerosock_cli::vm::kernel::Kernel;
use zerosock_testkit::device::{Device, Endpoint};
use zerosock_testkit::protocol::{Command, Socket, Source};
use zerosock_testkit::remote::agent;
use zerosock_testkit::uml::{self, Guest};

use crate::Alone;
use crate::lab::{
    STEP, Skipped, cache, deadlines, device_program, echo, expected, guest_program, port,
    read_exact, short_dir, write, zerosock,
};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[("traffic", traffic), ("device_killed", device_killed)];

/// What it takes to boot, and to boot again.
struct Bench {
    kernel: Kernel,
    initramfs: PathBuf,
    endpoint: Endpoint,
    _dir: TempDir,
}

impl Bench {
    fn new() -> Result<Bench, Skipped> {
        let kernel = Kernel::user_mode()
            .ok_or_else(|| Skipped("install the package user-mode-linux".to_owned()))?;
        let dir = short_dir();
        let initramfs = dir.path().join("initramfs");
        let image = Builder::new(&cache(), &kernel, &guest_program(), &agent(uml::TTY), &[])
            .expect("an initramfs")
            .finish();
        std::fs::write(&initramfs, image).expect("the initramfs written");
        Ok(Bench {
            kernel,
            initramfs,
            endpoint: Endpoint::new(dir.path(), 3),
            _dir: dir,
        })
    }

    fn device(&self) -> Device {
        let endpoints = std::slice::from_ref(&self.endpoint);
        Device::start(&device_program(), endpoints, echo("device")).expect("a device")
    }

    fn boot(&self) -> Guest {
        let (image, socket) = (&self.initramfs, &self.endpoint.vhost);
        Guest::boot(&self.kernel, image, socket, zerosock(), echo("guest")).expect("a guest")
    }

    fn to_host(&self, guest: &Guest) -> (Socket, UnixStream) {
        let port = port();
        let listener = hybrid::listen(&self.endpoint.uds, port).expect("a listener");
        let connecting = guest.remote.start(Command::Connect { cid: 2, port });
        let stream = hybrid::accept(&listener, STEP).expect("the guest's connection");
        deadlines(&stream);
        (connecting.socket(STEP).expect("connected"), stream)
    }

    fn to_guest(&self, guest: &Guest) -> (Socket, UnixStream) {
        let port = port();
        let listen = Command::Listen { port };
        let listener = guest.remote.socket(listen, STEP).expect("a listener");
        let accepting = guest.remote.start(Command::Accept { socket: listener });
        let (stream, _) = hybrid::connect(&self.endpoint.uds, port, STEP).expect("connected");
        deadlines(&stream);
        (accepting.socket(STEP).expect("accepted"), stream)
    }

    /// Both directions on connections made from both ends.
    fn exchange(&self, guest: &Guest, len: u64) {
        for (socket, stream) in [self.to_host(guest), self.to_guest(guest)] {
            let source = Source::Pattern { seed: 1, len };
            let chunks = vec![65536];
            let sending = guest.remote.start(Command::Send {
                socket,
                source,
                chunks,
            });
            assert_eq!(read_exact(&stream, len), expected(1, len));
            assert_eq!(sending.wait(STEP).expect("sent").errno, None);
            let receiving = guest.remote.start(receive(socket, Some(len)));
            let digest = write(&stream, 2, len, &[65536]);
            let received = receiving.wait(STEP).expect("received");
            assert_eq!(received.sha256, Some(digest));
        }
    }
}

fn receive(socket: Socket, limit: Option<u64>) -> Command {
    Command::Receive {
        socket,
        limit,
        keep: false,
        acknowledge: false,
    }
}

fn traffic() -> Result<(), Skipped> {
    let bench = Bench::new()?;
    let mut device = bench.device();
    let guest = bench.boot();
    println!("booted user-mode Linux {}", guest.release);
    bench.exchange(&guest, 16 << 20);
    drop(guest);
    // The next guest on the same socket finds the device as the first one did.
    let guest = bench.boot();
    bench.exchange(&guest, 1 << 20);
    assert!(device.is_running());
    Ok(())
}

/// The daemon is killed: the guest lives on and its connections end at once. A new daemon takes
/// over the sockets that the dead one left behind, and serves the guest's next boot.
fn device_killed() -> Result<(), Skipped> {
    let bench = Bench::new()?;
    let mut device = bench.device();
    let mut guest = bench.boot();
    let (socket, _stream) = bench.to_host(&guest);
    let waiting = guest.remote.start(receive(socket, None));
    device.kill();
    let ended = waiting.wait(STEP).expect("an end, not silence");
    assert!(ended.end || ended.errno.is_some(), "{ended:?}");
    let connect = Command::Connect { cid: 2, port: 1 };
    let gone = guest
        .remote
        .run(connect, STEP)
        .expect("the guest still answers");
    assert!(gone.errno.is_some(), "{gone:?}");
    assert!(guest.is_running());

    let _device = bench.device();
    drop(guest);
    let guest = bench.boot();
    bench.exchange(&guest, 1 << 20);
    Ok(())
}
