//! Huge pages of stock guests, seen from the host: they lie where the guest says, and stay there while a keeper pins them,
//! after `kill -9` of the process that has started it and after a client has freed its file. What is missing is named: huge
//! pages, and the capability to see addresses.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use tempfile::TempDir;
use zerosock::guest::key::Nonce;
use zerosock::guest::page_value::{PAGE, find_wrong_page};
use zerosock_cli::vm::initramfs::Builder;
use zerosock_cli::vm::qemu;
use zerosock_ring::{Extent, Memory};
use zerosock_testkit::guest::NAME;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::remote::{Guest, agent};

use crate::lab::{STEP, Skipped, accel, cache, echo, guest_program, zerosock};
use crate::{Alone, kernels};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("pinned_pages_outlive_their_processes_on_6.12", || {
        pinned("6.12")
    }),
    ("pinned_pages_outlive_their_processes_on_6.1", || {
        pinned("6.1")
    }),
];

/// Below 3 GiB the whole memory is one region: an address is an offset in its file.
const MEMORY: u64 = 768 << 20;
/// A part of it lies above the hole for devices, from 4 GiB on: the kernel of the guest takes pages there first.
const LARGE: u64 = 5 << 30;
/// Pages of the attachment.
const PAGES: u64 = 6;
/// Pages of the guest.
const ALL_PAGES: u64 = 8;

/// A guest with a file as its memory.
pub(crate) struct Machine {
    pub(crate) guest: Guest,
    pub(crate) memory: PathBuf,
    /// Bytes of the memory.
    size: u64,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    _dir: TempDir,
}

/// What a guest has besides a vsock device.
pub(crate) struct Extras {
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// Processors.
    pub(crate) cpus: u32,
    /// Arguments of QEMU.
    pub(crate) arguments: Vec<String>,
    /// Whether a reboot does not end it.
    pub(crate) reboots: bool,
}

impl Default for Extras {
    fn default() -> Extras {
        Extras {
            memory: MEMORY,
            cpus: 1,
            arguments: Vec::new(),
            reboots: false,
        }
    }
}

impl Machine {
    /// With a vsock device, if a vhost-user socket of one is given.
    pub(crate) fn boot(release: &str, vsock: Option<&Path>) -> Result<Machine, Skipped> {
        Machine::boot_with(release, vsock, Extras::default())
    }

    /// With memory above 4 GiB.
    pub(crate) fn boot_large(release: &str, vsock: &Path) -> Result<Machine, Skipped> {
        let extras = Extras {
            memory: LARGE,
            ..Extras::default()
        };
        Machine::boot_with(release, Some(vsock), extras)
    }

    pub(crate) fn boot_with(
        release: &str,
        vsock: Option<&Path>,
        extras: Extras,
    ) -> Result<Machine, Skipped> {
        let kernel = kernels::debian(release)?;
        // Shared memory, as that of a VM with devices over vhost-user.
        let dir = tempfile::Builder::new().prefix("zs").tempdir_in("/dev/shm");
        let dir = dir.expect("a directory in /dev/shm");
        let initramfs = dir.path().join("initramfs");
        let agent = agent(qemu::TTY);
        let program = small(&guest_program(), dir.path());
        let image = Builder::new(&cache(), &kernel, &program, &agent, &[]);
        std::fs::write(&initramfs, image.expect("an initramfs").finish()).expect("a file");
        let memory = dir.path().join("memory");
        let mib = extras.memory >> 20;
        let object = format!(
            "memory-backend-file,id=mem,size={mib}M,mem-path={},share=on",
            memory.display()
        );
        let size = format!("{mib}M");
        let mut machine = ["-m", &size, "-object", &object, "-numa", "node,memdev=mem"]
            .map(str::to_owned)
            .to_vec();
        if let Some(socket) = vsock {
            let chardev = format!("socket,id=device,path={}", socket.display());
            let device = format!("{},chardev=device", qemu::VSOCK);
            machine.extend(["-chardev".to_owned(), chardev, "-device".to_owned(), device]);
        }
        machine.extend(extras.arguments);
        let guest = Guest::boot(qemu::Config {
            kernel: &kernel,
            initramfs: &initramfs,
            cpus: extras.cpus,
            machine,
            dir: dir.path(),
            reboots: extras.reboots,
            accel: accel(),
            zerosock: zerosock(),
            echo: echo("guest"),
        });
        Ok(Machine {
            guest: guest.expect("a guest"),
            memory,
            size: extras.memory,
            kernel: kernel.image,
            initramfs,
            _dir: dir,
        })
    }

    /// Runs a command of the guest's shell. Returns what it prints.
    pub(crate) fn shell(&self, script: &str) -> String {
        let argv = ["/bin/busybox", "sh", "-c", script].map(str::to_owned);
        let run = Command::Run { argv: argv.into() };
        let outcome = self.guest.remote.run(run, STEP).expect("an outcome");
        outcome.text.unwrap_or_default()
    }

    /// A step of `pages`, by this command of the test guest.
    pub(crate) fn pages(&self, step: &str) -> String {
        self.shell(&format!("/bin/zerosock {NAME} pages {step}"))
    }

    /// Takes pages, which the kernel may free a little later.
    pub(crate) fn take_in_time(&self, pages: u64) {
        let deadline = Instant::now() + STEP;
        loop {
            let text = self.pages(&format!("take --pages {pages}"));
            if text.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "{text}");
        }
    }

    /// The extents as the host sees them, in the order in which the guest has named them.
    pub(crate) fn view(&self, extents: &[Extent]) -> Memory {
        let file = File::options().read(true).write(true).open(&self.memory);
        let memory = Memory::of_file(file.expect("the guest's memory"), self.size);
        let memory = Arc::new(memory.expect("a mapping"));
        Memory::of_extents(&memory, extents).expect("extents in the guest's memory")
    }
}

/// The program without symbols, where strip(1) is: a guest boots faster with it, and has more free memory.
fn small(program: &Path, dir: &Path) -> PathBuf {
    let small = dir.join("program");
    let mut strip = std::process::Command::new("strip");
    let status = strip.arg("-o").arg(&small).arg(program).status();
    match status {
        Ok(status) if status.success() => small,
        _ => program.to_owned(),
    }
}

fn parse(text: &str) -> Vec<Extent> {
    let extents = text.lines().map(|line| {
        let (addr, len) = line.split_once(' ').unwrap_or_else(|| panic!("{text}"));
        let [addr, len] = [addr, len].map(|it| it.parse().unwrap_or_else(|_| panic!("{text}")));
        Extent { addr, len }
    });
    extents.collect()
}

fn pinned(release: &str) -> Result<(), Skipped> {
    let machine = Machine::boot(release, None)?;
    let nonce = Nonce([9; 32]);
    let all = 0..PAGES * (Extent::HUGE_PAGE / PAGE);
    let register = format!("register --pages {PAGES} --nonce 9");

    // There are no huge pages: the error says what to set.
    let text = machine.pages(&register);
    let wanted = format!("run `echo {PAGES} > /proc/sys/vm/nr_hugepages`");
    assert!(text.contains(&wanted), "{text}");
    let text = machine.shell(&format!("echo {ALL_PAGES} > /proc/sys/vm/nr_hugepages"));
    assert_eq!(text, "");

    // Root sees where a page lies, another user is told what is missing.
    let text = machine.pages("find");
    assert!(text.starts_with("[Extent"), "{text}");
    let text = machine.shell(&format!(
        "/bin/zerosock {NAME} unprivileged -- /bin/zerosock {NAME} pages find"
    ));
    assert!(text.contains("CAP_SYS_ADMIN"), "{text}");

    // Each page is where the guest says, and in this order.
    let extents = parse(&machine.pages(&register));
    let lens: u64 = extents.iter().map(|extent| extent.len).sum();
    assert_eq!(lens, PAGES * Extent::HUGE_PAGE, "{extents:?}");
    let memory = machine.view(&extents);
    assert_eq!(find_wrong_page(&memory, &nonce, all.clone()), None);
    assert_eq!(
        find_wrong_page(&memory, &Nonce([8; 32]), all.clone()),
        Some(0)
    );

    // That process is dead. A client frees the file, and the guest's kernel still gives the pages to nothing else.
    assert_eq!(machine.pages("free"), "");
    let take = format!("take --pages {PAGES}");
    let text = machine.pages(&take);
    let more = ALL_PAGES + PAGES - (ALL_PAGES - PAGES);
    let wanted = format!("`echo {more} > /proc/sys/vm/nr_hugepages`");
    assert!(text.contains(&wanted), "{text}");
    let rest = ALL_PAGES - PAGES;
    assert_eq!(machine.pages(&format!("take --pages {rest}")), "");
    // Fewer huge pages are wanted, and all of the memory is: those that are pinned stay.
    machine.shell("echo 0 > /proc/sys/vm/nr_hugepages; /bin/busybox dd if=/dev/zero of=/tmp/all bs=1M count=100; rm /tmp/all");
    assert_eq!(find_wrong_page(&memory, &nonce, all.clone()), None);

    // The next agent finds the keeper, and unpins. The pages are free at once.
    assert_eq!(machine.pages("unpin"), "");
    machine.shell(&format!("echo {ALL_PAGES} > /proc/sys/vm/nr_hugepages"));
    assert_eq!(machine.pages(&format!("take --pages {ALL_PAGES}")), "");
    assert!(find_wrong_page(&memory, &nonce, all).is_some());
    Ok(())
}
