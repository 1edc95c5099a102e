//! A second kind of device on the same event loop and control thread, with a stock guest under QEMU.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use zerosock_cli::vm::initramfs::Builder;
use zerosock_cli::vm::pattern::sha256;
use zerosock_cli::vm::qemu;
use zerosock_testkit::entropy::Device;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::remote::{Guest, agent};

use crate::lab::{STEP, Skipped, accel, cache, echo, guest_program, short_dir, zerosock};
use crate::{Alone, kernels};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[("fills_the_buffers_of_a_guest", fills)];

const BYTES: usize = 64 << 10;

/// Reads from the guest's hardware random number generator and compares with `byte`.
fn read(guest: &Guest, byte: u8) {
    let script = format!(
        "B=/bin/busybox; $B dd if=/dev/hwrng bs=1024 count={} 2>/dev/null | $B sha256sum",
        BYTES / 1024
    );
    let argv = ["/bin/busybox", "sh", "-c", &script].map(str::to_owned);
    let run = Command::Run { argv: argv.into() };
    let outcome = guest.remote.run(run, STEP).expect("an outcome");
    let text = outcome.text.unwrap_or_default();
    let sum = text.split_whitespace().next().unwrap_or_default();
    assert_eq!(sum, sha256(&[byte; BYTES]), "{text}");
}

/// A guest reads what the device writes, reboots, reads again, and ends.
fn fills() -> Result<(), Skipped> {
    let kernel = kernels::debian("6.1")?;
    let dir = short_dir();
    let initramfs = dir.path().join("initramfs");
    let modules = &["virtio_rng"];
    let agent = agent(qemu::TTY);
    let image = Builder::new(&cache(), &kernel, &guest_program(), &agent, modules);
    std::fs::write(&initramfs, image.expect("an initramfs").finish()).expect("a file");

    let socket = dir.path().join("entropy");
    let device = Device::start(&socket).expect("a device");
    let state = device.state.clone();
    state.byte.store(0xa5, Ordering::Relaxed);
    let guest = Guest::boot(qemu::Config {
        kernel: &kernel,
        initramfs: &initramfs,
        cpus: 1,
        machine: qemu::device(256, "vhost-user-rng-pci", &socket),
        dir: dir.path(),
        reboots: true,
        accel: accel(),
        zerosock: zerosock(),
        echo: echo("guest"),
    })
    .expect("a guest");
    read(&guest, 0xa5);
    assert!(state.written.load(Ordering::Relaxed) >= BYTES as u64);
    let starts = state.starts.load(Ordering::Relaxed);

    // The next driver resets the device and starts the queue again.
    state.byte.store(0x3c, Ordering::Relaxed);
    drop(guest.remote.start(Command::Reboot));
    let release = guest.remote.wait_for_boot(2, STEP);
    assert!(release.is_some(), "the guest did not boot again");
    read(&guest, 0x3c);
    assert!(state.starts.load(Ordering::Relaxed) > starts);

    // The guest is killed: the device waits for the next front-end.
    drop(guest);
    let deadline = Instant::now() + STEP;
    while state.disconnects.load(Ordering::Relaxed) == 0 {
        assert!(Instant::now() < deadline, "the device serves a dead guest");
        std::thread::sleep(Duration::from_millis(10));
    }
    device.shutdown().expect("an event loop");
    Ok(())
}
