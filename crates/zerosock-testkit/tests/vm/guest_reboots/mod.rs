//! Guests with endpoints that reboot under traffic, in each way in which a guest leaves its device: all endpoints end, the
//! daemon has nothing more of them, and it writes no byte into pages that they had. The next boot fills its free memory with
//! patterns, and checks them while the next endpoints have traffic. In a pause nothing changes, and the traffic goes on.

mod base_zero;
mod traffic;

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;
use zerosock_cli::vm::hybrid;
use zerosock_ring::{Extent, Memory};
use zerosock_testkit::device::{Device, Endpoint};
use zerosock_testkit::guest::NAME;
use zerosock_testkit::protocol::{Command, PatternStep};

use crate::Alone;
use crate::guest_endpoint::start_daemon;
use crate::guest_pages::{Extras, Machine};
use crate::lab::{STEP, Skipped, short_dir};
use crate::monitor::Monitor;
use Way::{Kexec, PausedReset, Sysrq, SystemReset, Unbind};
use traffic::{Connection, Traffic};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("endpoints_end_with_each_reboot_on_6.12", || {
        reboots("6.12", [Kexec, Unbind, Sysrq, SystemReset, PausedReset])
    }),
    ("endpoints_end_with_each_reboot_on_6.1", || {
        reboots("6.1", [Kexec, Unbind, PausedReset, SystemReset, Sysrq])
    }),
];

const KEY: &str = "0123456789abcdef0123456789abcdef";
const PORT: u32 = 4322;
/// The host sends kernel and initramfs to these.
const KERNEL_PORT: u32 = 4323;
const INITRAMFS_PORT: u32 = 4324;
/// In the daemon's log.
const RESET: &str = "guest endpoint gone: the guest's driver has reset the VM's device";
/// Programs in the guest, each with an endpoint.
const CLIENTS: usize = 2;
/// Huge pages of their endpoints: five each.
const HUGE_PAGES: u64 = 10;
/// Of the guest: enough for its files twice, and for the kernel's copies of those that it is to start.
const MEMORY: u64 = 320 << 20;
/// Reboots, unless others are asked for. What the VMM sees of the rest is the same, or as on the other kernel.
const REBOOTS: u32 = 3;
/// Bytes each way on each connection before the next step.
const TRAFFIC: u64 = 256 << 10;
/// A boot, on a busy machine.
const BOOT: Duration = Duration::from_secs(150);
/// How long the pages of a guest that stands still are watched.
const WATCH: Duration = Duration::from_millis(100);
/// Time that a reboot takes at most.
const LONGEST: Duration = Duration::from_secs(240);

/// How a guest leaves its device.
#[derive(Copy, Clone, Debug)]
enum Way {
    /// The kernel resets the machine and tells no driver.
    Sysrq,
    /// The VMM resets the machine.
    SystemReset,
    /// The VMM resets a machine that stands still.
    PausedReset,
    /// The kernel starts another one.
    Kexec,
    /// The driver is unbound from the device, and bound again. The kernel and its programs go on.
    Unbind,
}

/// Reboots that were asked for.
fn asked() -> Option<u32> {
    let text = std::env::var("ZEROSOCK_GUEST_REBOOTS").ok()?;
    Some(text.parse().expect("a number in ZEROSOCK_GUEST_REBOOTS"))
}

/// The longest time that the reboots take that were asked for.
pub(crate) fn limit() -> Duration {
    LONGEST * asked().unwrap_or(0)
}

/// What the daemon has.
#[derive(Debug, Eq, PartialEq)]
struct Resources {
    descriptors: usize,
    /// Mappings of the guest's memory: address space of each, in bytes.
    mapped: Vec<u64>,
    /// Its counters of what exists now.
    counters: Vec<String>,
}

/// A guest that reboots, its daemon, and the host's programs.
struct Lab {
    machine: Machine,
    monitor: Monitor,
    device: Device,
    uds: PathBuf,
    traffic: Traffic,
    /// What the daemon has when the guest has no endpoint.
    at_start: Option<Resources>,
    boots: u32,
    /// Pages of former endpoints, and how many of them had a pattern.
    former_pages: u64,
    covered_pages: u64,
    /// Bytes with a pattern, over all boots.
    filled: u64,
    _dir: TempDir,
}

fn wait_for<T>(lab: &Lab, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + BOOT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        if Instant::now() > deadline {
            let (console, log) = (lab.machine.guest.console.tail(20), lab.device.log.tail(20));
            panic!("not in time: {what}\nguest:\n{console}\ndaemon:\n{log}");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Sends the file to each program that connects.
fn serve_file(uds: &Path, port: u32, file: &Path) {
    let listener = hybrid::listen(uds, port).expect("a port of the host");
    let bytes = fs::read(file).expect("a file");
    thread::spawn(move || {
        for socket in listener.incoming() {
            let _ = socket.expect("a connection").write_all(&bytes);
        }
    });
}

impl Lab {
    fn start(release: &str) -> Result<Lab, Skipped> {
        let dir = short_dir();
        let endpoint = Endpoint::new(dir.path(), 3);
        let key = dir.path().join("key");
        fs::write(&key, KEY).expect("a file");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("a mode");
        let traffic = Traffic::default();
        traffic.serve(hybrid::listen(&endpoint.uds, PORT).expect("a port of the host"));
        let device = start_daemon(&endpoint, &key, &dir.path().join("attach"));
        let monitor = dir.path().join("monitor");
        let monitors = UnixListener::bind(&monitor).expect("a listener");
        let extras = Extras {
            arguments: ["-qmp".into(), format!("unix:{}", monitor.display())].into(),
            memory: MEMORY,
            reboots: true,
            ..Extras::default()
        };
        let machine = Machine::boot_with(release, Some(&endpoint.vhost), extras)?;
        // A QEMU that could not use KVM has connected before.
        monitors.set_nonblocking(true).expect("a mode");
        let monitor = monitors.incoming().map_while(Result::ok).last();
        let monitor = monitor.expect("a monitor");
        monitor.set_nonblocking(false).expect("a mode");
        serve_file(&endpoint.uds, KERNEL_PORT, &machine.kernel);
        serve_file(&endpoint.uds, INITRAMFS_PORT, &machine.initramfs);
        let mut lab = Lab {
            machine,
            monitor: Monitor::new(monitor),
            device,
            uds: endpoint.uds,
            traffic,
            at_start: None,
            boots: 1,
            former_pages: 0,
            covered_pages: 0,
            filled: 0,
            _dir: dir,
        };
        lab.at_start = Some(lab.resources());
        Ok(lab)
    }

    fn patterns(&self, step: PatternStep) -> String {
        let run = Command::Patterns(step);
        let outcome = self.machine.guest.remote.run(run, BOOT);
        let outcome = outcome.unwrap_or_else(|error| {
            panic!("{error}\n{}", self.machine.guest.console.tail(20));
        });
        outcome.text.unwrap_or_default()
    }

    fn start_in_guest(&self, line: &str) {
        let argv = line.split(' ').map(str::to_owned).collect();
        let started = self.machine.guest.remote.run(Command::Start { argv }, STEP);
        started.expect("a program");
    }

    /// Fills the memory of the guest, which has just booted, and starts the agent and its clients.
    fn populate(&mut self, former: &[Extent], loads_kernel: bool) {
        if loads_kernel {
            // What is loaded stays out of the memory that is free.
            let script = format!(
                "cd /tmp; /bin/zerosock nc vsock:2:{KERNEL_PORT} < /dev/null > kernel && \
                 /bin/zerosock nc vsock:2:{INITRAMFS_PORT} < /dev/null > initramfs && \
                 /bin/zerosock {NAME} kexec load kernel initramfs && rm kernel initramfs"
            );
            assert_eq!(self.machine.shell(&script), "");
        }
        let text = self.patterns(PatternStep::Fill {
            former: former.iter().map(|it| (it.addr, it.len)).collect(),
            huge_pages: HUGE_PAGES,
            seed: self.boots.into(),
        });
        let numbers = text
            .strip_prefix("filled=")
            .and_then(|it| it.split_once(" covered="));
        let (filled, covered) = numbers.unwrap_or_else(|| panic!("{text}"));
        self.filled += filled.parse::<u64>().expect("a number");
        self.covered_pages += covered.parse::<u64>().expect("a number");
        self.former_pages += former.iter().map(|it| it.len >> 12).sum::<u64>();
        let setup = format!("printf %s {KEY} > /key; chmod 600 /key");
        assert_eq!(self.machine.shell(&setup), "");
        self.start_in_guest("/bin/zerosock guest --key /key --attach-uid 65534 --socket-mode 0666");
        let socket = "/run/zerosock/attach.sock";
        let waiting = format!("while ! test -S {socket}; do sleep 0.1; done");
        assert_eq!(self.machine.shell(&waiting), "");
        for _ in 0..CLIENTS {
            self.start_in_guest(&format!(
                "/bin/zerosock {NAME} unprivileged -- /bin/zerosock {NAME} traffic --socket {socket} --port {PORT}"
            ));
        }
    }

    /// Until each program has exchanged more bytes. Returns their connections.
    fn wait_for_traffic(&self) -> Vec<Arc<Connection>> {
        let connections = wait_for(self, "connections", || {
            Some(self.traffic.live()).filter(|it| it.len() == CLIENTS)
        });
        let from: Vec<u64> = connections.iter().map(|it| it.progress()).collect();
        wait_for(self, "traffic", || {
            self.traffic.live();
            let mut all = connections.iter().zip(&from);
            all.all(|(it, from)| it.progress() >= from + TRAFFIC)
                .then_some(())
        });
        connections
    }

    /// No byte of the memory with patterns has changed.
    fn check_patterns(&self) {
        assert_eq!(self.patterns(PatternStep::Check), "", "boot {}", self.boots);
    }

    /// Where the pages of the endpoints are.
    fn extents(&self) -> Vec<Extent> {
        let dir = "/run/zerosock/pages".into();
        let text = self.patterns(PatternStep::Locate { dir });
        let extents = text.lines().map(|line| {
            let (addr, len) = line.split_once(' ').unwrap_or_else(|| panic!("{text}"));
            let [addr, len] = [addr, len].map(|it| it.parse().expect("a number"));
            Extent { addr, len }
        });
        let extents: Vec<Extent> = extents.collect();
        let pages: u64 = extents.iter().map(|it| it.len / Extent::HUGE_PAGE).sum();
        assert_eq!(pages, HUGE_PAGES, "{text}");
        extents
    }

    /// Nothing but the daemon can write these pages: it does not.
    fn assert_still(&self, extents: &[Extent], what: &str) {
        let view = self.machine.view(extents);
        let before = bytes(&view);
        thread::sleep(WATCH);
        assert_same(&before, &bytes(&view), what);
    }

    /// The VM is paused, and goes on: so does the traffic, on the same connections.
    fn pause(&mut self, extents: &[Extent]) {
        let before = self.wait_for_traffic();
        self.monitor.ask("stop", json!({}));
        self.assert_still(extents, "paused");
        self.monitor.ask("cont", json!({}));
        let after = self.wait_for_traffic();
        let same = before
            .iter()
            .all(|it| after.iter().any(|other| Arc::ptr_eq(it, other)));
        assert!(same, "the connections of before the pause have ended");
    }

    fn leave(&mut self, way: Way, extents: &[Extent]) {
        match way {
            Sysrq => {
                let argv = ["/bin/busybox", "sh", "-c", "echo b > /proc/sysrq-trigger"];
                let argv = argv.map(str::to_owned).into();
                drop(self.machine.guest.remote.start(Command::Run { argv }));
            }
            Kexec => {
                let argv = ["/bin/zerosock", NAME, "kexec", "start"];
                let argv = argv.map(str::to_owned).into();
                drop(self.machine.guest.remote.start(Command::Run { argv }));
            }
            SystemReset => drop(self.monitor.ask("system_reset", json!({}))),
            PausedReset => {
                self.monitor.ask("stop", json!({}));
                self.assert_still(extents, "paused");
                self.monitor.ask("system_reset", json!({}));
                self.assert_still(extents, "reset");
                self.monitor.ask("cont", json!({}));
            }
            Unbind => return self.unbind(extents),
        }
        self.wait_for_boot();
    }

    fn wait_for_boot(&mut self) {
        self.boots += 1;
        let booted = self.machine.guest.remote.wait_for_boot(self.boots, BOOT);
        if booted.is_none() {
            let console = self.machine.guest.console.tail(20);
            panic!("the guest does not boot again:\n{console}");
        }
    }

    fn unbind(&mut self, extents: &[Extent]) {
        let driver = "cd /sys/bus/virtio/drivers/vmw_vsock_virtio_transport";
        let name = self.machine.shell(&format!("{driver}; echo virtio*"));
        let name = name.trim();
        assert_eq!(
            self.machine
                .shell(&format!("{driver}; echo {name} > unbind")),
            ""
        );
        // The programs would write their own pages.
        self.signal_clients("STOP");
        let view = self.machine.view(extents);
        let before = bytes(&view);
        self.assert_still(extents, "unbound");
        assert_eq!(
            self.machine.shell(&format!("{driver}; echo {name} > bind")),
            ""
        );
        self.assert_ended();
        assert_same(&before, &bytes(&view), "bound again");
        self.signal_clients("CONT");
    }

    fn signal_clients(&self, signal: &str) {
        let script = format!(
            "for p in /proc/[0-9]*; do grep -q 'traffi[c]' $p/cmdline 2>/dev/null && kill -{signal} ${{p#/proc/}}; done; true"
        );
        assert_eq!(self.machine.shell(&script), "");
    }

    /// The daemon has ended the endpoints that were there, because of the reset, and with them their connections.
    fn assert_endpoints_ended(&self) {
        wait_for(self, "ends of connections", || {
            self.traffic.live().is_empty().then_some(())
        });
        wait_for(self, "ends of endpoints because of a reset", || {
            let log = self.device.log.tail(usize::MAX);
            let cids = |event: &str| {
                let lines = log.lines().filter(|line| line.contains(event));
                let cid = |line: &str| {
                    let mut words = line.split_ascii_whitespace();
                    words
                        .find(|word| word.starts_with("cid="))
                        .map(str::to_owned)
                };
                lines.filter_map(cid).collect::<Vec<_>>()
            };
            // A CID is not used again for long.
            let (attached, ended) = (cids("guest endpoint attached"), cids(RESET));
            let mut last = attached.iter().rev().take(CLIENTS);
            last.all(|cid| ended.contains(cid)).then_some(())
        });
    }

    /// And it has what it had at the start.
    fn assert_ended(&self) {
        self.assert_endpoints_ended();
        let wanted = self.at_start.as_ref();
        let mut last = None;
        let deadline = Instant::now() + STEP;
        while last.as_ref() != wanted {
            assert!(Instant::now() < deadline, "{last:?} is not {wanted:?}");
            last = Some(self.resources());
        }
    }

    fn resources(&self) -> Resources {
        let id = self.device.id();
        let fds = fs::read_dir(format!("/proc/{id}/fd")).expect("a process");
        let maps = fs::read_to_string(format!("/proc/{id}/maps")).expect("a process");
        let memory = self.machine.memory.to_str().expect("text");
        let mapped = maps.lines().filter(|line| line.contains(memory));
        let mapped = mapped.map(|line| {
            let (range, _) = line.split_once(' ').expect("a mapping");
            let (start, end) = range.split_once('-').expect("a range");
            let [start, end] =
                [start, end].map(|it| u64::from_str_radix(it, 16).expect("a number"));
            end - start
        });
        let before = self.report();
        let pid = Pid::from_raw(id.try_into().expect("an id")).expect("an id");
        kill_process(pid, Signal::USR1).expect("a process");
        // Each line has its time.
        let line = wait_for(self, "a report", || {
            self.report().filter(|it| Some(it) != before.as_ref())
        });
        let counters = line
            .split_ascii_whitespace()
            .filter(|word| word.contains("_now=") || word.starts_with("guest_endpoints="));
        Resources {
            descriptors: fds.count(),
            mapped: mapped.collect(),
            counters: counters.map(str::to_owned).collect(),
        }
    }

    /// The last line with all counters.
    fn report(&self) -> Option<String> {
        let log = self.device.log.tail(usize::MAX);
        let line = log.lines().rfind(|line| line.contains("guest_endpoints="));
        line.map(str::to_owned)
    }
}

fn bytes(view: &Memory) -> Vec<u8> {
    let (mut all, mut pieces) = (vec![0; view.size() as usize], Vec::new());
    let len = all.len().try_into().expect("a length");
    view.translate(0, len, &mut pieces).expect("a range");
    assert_eq!(view.read(&pieces, 0, &mut all), all.len());
    all
}

fn assert_same(before: &[u8], after: &[u8], what: &str) {
    if before != after {
        let at = before.iter().zip(after).position(|(a, b)| a != b);
        panic!("{what}: byte {at:?} of the pages has changed");
    }
}

/// Reboots in these ways in turn.
fn reboots(release: &str, ways: [Way; 5]) -> Result<(), Skipped> {
    let mut lab = Lab::start(release)?;
    let count = asked().unwrap_or(REBOOTS);
    let mut order = ways.into_iter().cycle().take(count as usize).peekable();
    let loads = |way: Option<&Way>| matches!(way, Some(Kexec));
    lab.populate(&[], loads(order.peek()));
    while let Some(way) = order.next() {
        let start = Instant::now();
        lab.wait_for_traffic();
        lab.check_patterns();
        let extents = lab.extents();
        lab.pause(&extents);
        lab.leave(way, &extents);
        if !matches!(way, Unbind) {
            lab.assert_ended();
            lab.populate(&extents, loads(order.peek()));
        }
        println!("{way:?}: {:.1} s", start.elapsed().as_secs_f64());
    }
    lab.wait_for_traffic();
    lab.check_patterns();
    if asked().is_some() {
        let start = Instant::now();
        base_zero::goes_on(&mut lab);
        let extents = base_zero::reboots(&mut lab);
        lab.assert_ended();
        lab.populate(&extents, false);
        lab.wait_for_traffic();
        lab.check_patterns();
        println!("base 0: {:.1} s", start.elapsed().as_secs_f64());
    }
    println!(
        "{count} reboots of {release}: {} boots, {} MiB filled and checked, {} of {} pages of former endpoints among them",
        lab.boots,
        lab.filled >> 20,
        lab.covered_pages,
        lab.former_pages
    );
    Ok(())
}
