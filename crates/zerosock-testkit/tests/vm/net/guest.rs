//! Guests with a network card, under QEMU and user-mode Linux.

use std::path::{Path, PathBuf};

use tempfile::TempDir;
use zerosock_cli::vm::initramfs::Builder;
use zerosock_cli::vm::kernel::Kernel;
use zerosock_cli::vm::qemu;
use zerosock_testkit::packages::add_program;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::remote::{self, Pending, Remote, agent};
use zerosock_testkit::uml;

use crate::kernels;
use crate::lab::{STEP, Skipped, accel, cache, echo, guest_program, short_dir, zerosock};

/// Modules besides those of every guest.
const MODULES: &[&str] = &["af_packet", "failover", "net_failover", "virtio_net"];

/// Programs of this machine that go into the guest if they are installed.
const PROGRAMS: &[&str] = &["/usr/bin/iperf3", "/usr/sbin/ethtool"];

/// Programs of Debian's packages that go into the guest if they can be had: an SSH server, its client, and
/// scp. Those of OpenSSH have ten times as many libraries.
const PACKAGED: &[(&str, &str, &[&str])] = &[
    ("bin/dropbear", "usr/sbin/dropbear", DROPBEAR),
    ("bin/dbclient", "usr/bin/dbclient", DROPBEAR),
    ("bin/scp", "usr/bin/scp", &["openssh-client"]),
];
const DROPBEAR: &[&str] = &["dropbear-bin", "libtomcrypt1", "libtommath1", "libgmp10"];

/// MiB of memory of a guest under QEMU.
pub(crate) const MEMORY_MIB: u64 = 256;

/// A kernel with its first file system.
pub(crate) struct Image {
    kernel: Kernel,
    initramfs: PathBuf,
    dir: TempDir,
}

impl Image {
    /// User-mode Linux.
    pub(crate) fn user_mode() -> Result<Image, Skipped> {
        Ok(Image::new(kernels::user_mode()?, uml::TTY))
    }

    /// Debian's kernel of a release, for QEMU.
    pub(crate) fn debian(release: &str) -> Result<Image, Skipped> {
        let kernel = kernels::of_release(release, kernels::debian(release)?)?;
        Ok(Image::new(kernel, qemu::TTY))
    }

    fn new(kernel: Kernel, tty: &str) -> Image {
        let dir = short_dir();
        let initramfs = dir.path().join("initramfs");
        let builder = Builder::new(&cache(), &kernel, &guest_program(), &agent(tty), MODULES);
        let mut builder = builder.expect("an initramfs");
        for path in PROGRAMS.iter().map(Path::new).filter(|path| path.exists()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let added = builder.program(&format!("bin/{name}"), path, &[]);
            added.expect("a program with its libraries");
        }
        for (name, file, packages) in PACKAGED {
            if let Err(reason) = add_program(&cache(), &mut builder, packages, file, name) {
                println!("the guest has no {name}: {reason}");
            }
        }
        std::fs::write(&initramfs, builder.finish()).expect("a file");
        Image {
            kernel,
            initramfs,
            dir,
        }
    }

    /// Boots user-mode Linux with a network card. The daemon listens on `socket`.
    pub(crate) fn boot_user_mode(&self, socket: &Path) -> Vm {
        self.boot_user_mode_with(&uml::device(socket, uml::NET))
    }

    /// Boots user-mode Linux with these arguments for memory and devices.
    pub(crate) fn boot_user_mode_with(&self, machine: &[String]) -> Vm {
        let (kernel, initramfs) = (&self.kernel, &self.initramfs);
        let guest = uml::Guest::boot(kernel, initramfs, machine, zerosock(), echo("guest"));
        let guest = guest.expect("a guest");
        Vm::new(guest.remote.clone(), Process::UserMode(guest))
    }

    /// Boots a guest under QEMU with a network card.
    pub(crate) fn boot_qemu(&self, card: &Card<'_>) -> Vm {
        self.boot_qemu_with(card.machine(), card.queues.into())
    }

    /// Boots a guest under QEMU with these arguments for memory and devices, and so many processors. One
    /// costs less to emulate than two.
    pub(crate) fn boot_qemu_with(&self, machine: Vec<String>, cpus: u32) -> Vm {
        let dir = tempfile::tempdir_in(self.dir.path()).expect("a directory");
        let guest = remote::Guest::boot(qemu::Config {
            kernel: &self.kernel,
            initramfs: &self.initramfs,
            cpus,
            machine,
            dir: dir.path(),
            reboots: true,
            accel: accel(),
            zerosock: zerosock(),
            echo: echo("guest"),
        });
        let guest = guest.expect("a guest");
        Vm::new(guest.remote.clone(), Process::Qemu(guest, dir))
    }
}

/// A network card of a guest under QEMU.
pub(crate) struct Card<'c> {
    /// Where the daemon listens.
    pub(crate) socket: &'c Path,
    pub(crate) mac: &'c str,
    /// Queue pairs.
    pub(crate) queues: u16,
    /// More properties of the device, such as `,host_mtu=9000`.
    pub(crate) properties: &'c str,
    /// More options of the character device, such as `,reconnect=1`.
    pub(crate) chardev: &'c str,
}

impl<'c> Card<'c> {
    /// One with one queue pair.
    pub(crate) fn new(socket: &'c Path, mac: &'c str) -> Card<'c> {
        Card {
            socket,
            mac,
            queues: 1,
            properties: "",
            chardev: "",
        }
    }

    /// QEMU's arguments for memory and this card.
    pub(crate) fn machine(&self) -> Vec<String> {
        let Card {
            socket,
            mac,
            queues,
            properties,
            chardev,
        } = self;
        let socket = socket.display();
        let (pairs, multi) = match queues {
            1 => (String::new(), ""),
            _ => (format!(",queues={queues}"), ",mq=on"),
        };
        let mut machine = qemu::memory(MEMORY_MIB);
        machine.extend([
            "-chardev".to_owned(),
            format!("socket,id=c0,path={socket}{chardev}"),
            "-netdev".to_owned(),
            format!("vhost-user,id=n0,chardev=c0{pairs}"),
            "-device".to_owned(),
            // QEMU 7.2 without KVM crashes with interrupt vectors. Without a boot loader in the card, the
            // firmware does not look for one in the network after a reboot.
            format!("virtio-net-pci,netdev=n0,mac={mac},vectors=0,romfile={multi}{properties}"),
        ]);
        machine
    }
}

/// A running guest; dropping it ends it, as a power failure would.
pub(crate) struct Vm {
    pub(crate) remote: Remote,
    process: Process,
}

enum Process {
    Qemu(
        remote::Guest,
        #[expect(dead_code, reason = "removed at the end")] TempDir,
    ),
    UserMode(uml::Guest),
}

impl Vm {
    fn new(remote: Remote, process: Process) -> Vm {
        let vm = Vm { remote, process };
        vm.install();
        vm
    }

    fn install(&self) {
        self.sh("/bin/busybox --install -s /bin");
    }

    /// Runs a script, which must succeed; returns its output.
    pub(crate) fn sh(&self, script: &str) -> String {
        let (status, text) = self.outcome(self.start(script));
        assert_eq!(status, 0, "{script}: {text}");
        text
    }

    /// Runs a script; returns its status and output.
    pub(crate) fn try_sh(&self, script: &str) -> (u64, String) {
        self.outcome(self.start(script))
    }

    /// Starts a script.
    pub(crate) fn start(&self, script: &str) -> Pending {
        let argv = ["/bin/busybox", "sh", "-c", script].map(str::to_owned);
        self.remote.start(Command::Run { argv: argv.into() })
    }

    /// Waits for the end of a script; returns its status and output.
    pub(crate) fn outcome(&self, pending: Pending) -> (u64, String) {
        match pending.wait(STEP) {
            Ok(outcome) => (outcome.bytes, outcome.text.unwrap_or_default()),
            Err(error) => panic!("{error}"),
        }
    }

    /// Gives the card an address and brings it up.
    pub(crate) fn configure(&self, address: &str) {
        self.sh(&format!(
            "ip link set lo up; ip addr add {address}/24 dev eth0 && ip link set eth0 up"
        ));
    }

    /// Whether a program is in the guest.
    pub(crate) fn has(&self, program: &str) -> bool {
        self.try_sh(&format!("test -x /bin/{program}")).0 == 0
    }

    /// Reboots a guest under QEMU.
    pub(crate) fn reboot(&self) {
        let boots = self.remote.boots();
        drop(self.remote.start(Command::Reboot));
        let release = self.remote.wait_for_boot(boots + 1, 2 * STEP);
        assert!(release.is_some(), "no second boot");
        self.install();
    }

    fn console(&self) -> (&'static str, String) {
        match &self.process {
            Process::Qemu(guest, _) => ("QEMU", guest.console.tail(60)),
            Process::UserMode(guest) => ("user-mode Linux", guest.console.tail(60)),
        }
    }
}

/// When a scenario fails, each of its guests shows its console: the one that did not answer may have
/// waited for another one.
impl Drop for Vm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (machine, console) = self.console();
            let boots = self.remote.boots();
            eprintln!(
                "console of the guest under {machine}, which booted {boots} times:\n{console}"
            );
        }
    }
}
