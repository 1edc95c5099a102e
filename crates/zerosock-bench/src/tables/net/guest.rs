//! Guests of the table: images with iperf3, and what is asked of a running guest.

use std::time::Duration;

use tempfile::TempDir;
use zerosock_cli::vm::accel::Choice;
use zerosock_cli::vm::qemu;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::remote::{self, Remote};
use zerosock_testkit::uml;

use super::iperf;
use crate::image::{Image, short_dir};
use crate::processes::{self, own_program};
use crate::report::line;

const MODULES: [&str; 3] = ["failover", "net_failover", "virtio_net"];
const MEMORY_MIB: u64 = 384;
/// Timeout of each step: the guest may be emulated on a busy machine.
const STEP: Duration = Duration::from_secs(60);
/// Names that QEMU gives to the threads of virtual processors begin with this.
const PROCESSOR: &str = "CPU ";

/// An image for guests under QEMU.
pub(super) fn qemu_image() -> Result<Image, String> {
    Image::qemu(&MODULES, |_, image| iperf::add(image))
}

/// An image for user-mode Linux.
pub(super) fn user_mode_image() -> Result<Image, String> {
    let missing = "user-mode Linux is not installed: run as root: apt-get install user-mode-linux";
    let kernel = uml::kernel().ok_or(missing)?;
    Image::new(kernel, uml::TTY, &MODULES, |_, image| iperf::add(image))
}

/// A running guest; dropping it ends it.
pub(super) struct Vm {
    remote: Remote,
    process: Process,
    _dir: Option<TempDir>,
}

enum Process {
    Qemu(remote::Guest),
    UserMode { _guest: uml::Guest },
}

impl Vm {
    /// Boots a guest under QEMU, with one processor and these devices. Guests are emulated everywhere,
    /// so that figures of machines with and without KVM are of one kind.
    pub(super) fn boot(image: &Image, devices: &[String]) -> Result<Vm, String> {
        let dir = short_dir()?;
        let mut machine = qemu::memory(MEMORY_MIB);
        machine.extend(["-name", "guest,debug-threads=on"].map(str::to_owned));
        machine.extend_from_slice(devices);
        let guest = image.boot(1, machine, dir.path(), Choice::Tcg)?;
        Ok(Vm {
            remote: guest.remote.clone(),
            process: Process::Qemu(guest),
            _dir: Some(dir),
        })
    }

    /// Boots user-mode Linux with these arguments for memory and devices.
    pub(super) fn boot_user_mode(image: &Image, machine: &[String]) -> Result<Vm, String> {
        let own = own_program()?;
        let guest = uml::Guest::boot(&image.kernel, &image.initramfs, machine, &own, None);
        let guest = guest.map_err(line)?;
        Ok(Vm {
            remote: guest.remote.clone(),
            process: Process::UserMode { _guest: guest },
            _dir: None,
        })
    }

    /// Runs a script; returns what it prints.
    pub(super) fn shell(&self, script: &str) -> Result<String, String> {
        let argv = ["/bin/busybox", "sh", "-c", script].map(str::to_owned);
        let run = Command::Run { argv: argv.into() };
        let outcome = self.remote.run(run, STEP).map_err(line)?;
        Ok(outcome.text.unwrap_or_default())
    }

    /// Gives the network device this address in a network of 256, and waits until `peer` answers.
    pub(super) fn set_up(&self, address: &str, peer: &str) -> Result<(), String> {
        let said = self.shell(&format!(
            "B=/bin/busybox; for n in vec0 eth0; do [ -e /sys/class/net/$n ] && break; done; \
             $B ip link set lo up; $B ip addr add {address}/24 dev $n && $B ip link set $n up; \
             for i in $($B seq 20); do $B ping -c 1 -W 1 {peer} >/dev/null && echo reached && break; \
             done"
        ))?;
        match said.trim().ends_with("reached") {
            true => Ok(()),
            false => Err(format!("the guest does not reach {peer}: {}", said.trim())),
        }
    }

    /// Sets up the network device without waiting for a peer.
    pub(super) fn set_address(&self, address: &str) -> Result<(), String> {
        let said = self.shell(&format!(
            "B=/bin/busybox; $B ip link set lo up; $B ip addr add {address}/24 dev eth0 && \
             $B ip link set eth0 up && echo done"
        ))?;
        match said.trim() {
            "done" => Ok(()),
            said => Err(format!("the guest's device: {said}")),
        }
    }

    /// Starts an iperf3 server that stays.
    pub(super) fn serve(&self, port: u16) -> Result<(), String> {
        let said = self.shell(&format!("/bin/iperf3 --server --daemon --port {port}"))?;
        match said.trim() {
            "" => Ok(()),
            said => Err(format!("iperf3 in the guest: {said}")),
        }
    }

    /// Median of the times of `count` pings, microseconds.
    pub(super) fn ping(&self, to: &str, count: usize) -> Result<f64, String> {
        let said = self.shell(&format!(
            "/bin/busybox ping -c {count} -i 0.01 -W 5 {to} | /bin/busybox sed -n 's/.*time=//p'"
        ))?;
        let mut times = times(&said);
        if times.len() * 10 < count * 9 {
            return Err(format!("{} of {count} pings were answered", times.len()));
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// CPU seconds so far of the VMM's threads that are no virtual processors. None of user-mode
    /// Linux, which has no such threads.
    pub(super) fn outside_seconds(&self) -> Result<Option<f64>, String> {
        match &self.process {
            Process::Qemu(guest) => processes::cpu_seconds_without(guest.id(), PROCESSOR).map(Some),
            Process::UserMode { .. } => Ok(None),
        }
    }
}

/// The times of ping, one a line: `0.123 ms`. In microseconds.
fn times(said: &str) -> Vec<f64> {
    let ms = said
        .lines()
        .filter_map(|line| line.trim().strip_suffix(" ms"));
    ms.filter_map(|ms| ms.parse::<f64>().ok())
        .map(|ms| ms * 1e3)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_ping_are_read_in_milliseconds() {
        assert_eq!(times("0.250 ms\n1.5 ms\nnothing\n"), [250.0, 1500.0]);
    }
}
