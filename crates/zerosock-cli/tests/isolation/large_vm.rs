//! A VM with 1 GiB of memory, every page of which is in use.

use std::fs::{self, File};
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use zerosock_sys::memfd;
use zerosock_sys::reaper::MAX_STUCK_EACH;

use super::daemon::{ATTACKER, Daemon};
use super::lingering::lingering_socket;
use super::process::wait_until;
use super::raw::{GET_FEATURES, RawFrontend, SET_MEM_TABLE, Way, message};
use super::threads::{REAPER, count_held};

const MIB: usize = 1 << 20;
/// Bytes of its memory.
pub(crate) const MEMORY: usize = 1024 * MIB;

/// Why there is no such VM.
pub(crate) fn no_memory() -> Option<String> {
    let info = fs::read_to_string("/proc/meminfo").unwrap();
    let mut lines = info.lines();
    let available = lines.find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = available.and_then(|kib| kib.split_whitespace().next()?.parse().ok());
    let enough = kib.is_some_and(|kib: usize| kib << 10 >= 2 * MEMORY);
    (!enough).then(|| format!("less than {} MiB of memory are available", 2 * MEMORY / MIB))
}

pub(crate) struct LargeVm {
    frontend: RawFrontend,
    /// The daemon's mapping of its memory.
    mapping: Mapping,
}

impl LargeVm {
    /// The VM writes to all of its memory and sends it. The daemon then has the only reference to
    /// it.
    pub(crate) fn start(daemon: &Daemon) -> LargeVm {
        let memory = memfd::create("large-vm", MEMORY as u64, true).unwrap();
        let mut memory = File::from(memory);
        let block = vec![1; MIB];
        for _ in 0..MEMORY / MIB {
            memory.write_all(&block).unwrap();
        }
        let frontend = daemon.frontend(ATTACKER);
        // One region: guest address, size, user address, offset.
        let table = [1, 0, MEMORY as u64, 0x7000_0000_0000, 0];
        let table: Vec<u8> = table.into_iter().flat_map(u64::to_ne_bytes).collect();
        let message = message(SET_MEM_TABLE, &table);
        frontend.send(&message, &[memory.as_fd()]).unwrap();
        assert!(frontend.ask_features().is_some());
        let mapping = Mapping::find(daemon.pid(), MEMORY);
        mapping.touch();
        // The kernel may have reclaimed single pages (DAMON).
        assert!(mapping.resident() >= MEMORY / 100 * 99, "{mapping:?}");
        LargeVm { frontend, mapping }
    }

    /// Uses up the VM's share of the reaper's threads: further unmaps and closes of the VM wait
    /// until the returned sockets are dropped.
    pub(crate) fn use_up_reaper(self, daemon: &Daemon) -> (LargeVm, Vec<TcpStream>) {
        let LargeVm { frontend, mapping } = self;
        let pairs = (0..MAX_STUCK_EACH).map(|_| lingering_socket());
        let (sockets, receivers) = pairs.unzip();
        let frontend = daemon.pass(frontend, Way::With(GET_FEATURES), sockets);
        wait_until("all reaper threads of one VM to be held", || {
            count_held(daemon.pid(), REAPER) == MAX_STUCK_EACH
        });
        let frontend = frontend.expect("still connected");
        (LargeVm { frontend, mapping }, receivers)
    }

    /// The front-end disconnects; returns when the daemon has noticed.
    pub(crate) fn die(self, daemon: &Daemon) -> Mapping {
        drop(self.frontend);
        assert!(daemon.frontend(ATTACKER).ask_features().is_some());
        self.mapping
    }
}

/// A mapping of a process.
#[derive(Debug)]
pub(crate) struct Mapping {
    process: u32,
    start: u64,
    inode: String,
}

impl Mapping {
    /// The mapping of a memory file at least as large.
    fn find(process: u32, at_least: usize) -> Mapping {
        let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
        let large = maps.lines().find(|line| {
            line.contains("memfd:") && size(line).is_some_and(|bytes| bytes >= at_least)
        });
        let line = large.expect("a large mapping");
        let (start, _) = line.split_once('-').unwrap();
        Mapping {
            process,
            start: u64::from_str_radix(start, 16).unwrap(),
            inode: line.split_whitespace().nth(4).unwrap().to_owned(),
        }
    }

    /// Causes all page faults of the mapping, as accesses of the process would.
    fn touch(&self) {
        let memory = File::open(format!("/proc/{}/mem", self.process)).unwrap();
        let mut block = vec![0; MIB];
        for at in (self.start..self.start + MEMORY as u64).step_by(MIB) {
            memory.read_exact_at(&mut block, at).unwrap();
        }
    }

    fn is_of(&self, line: &str) -> bool {
        size(line).is_some() && line.split_whitespace().nth(4) == Some(&self.inode)
    }

    /// Bytes that are still mapped.
    pub(crate) fn size(&self) -> usize {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.process)).unwrap();
        let lines = maps.lines().filter(|line| self.is_of(line));
        lines.filter_map(size).sum()
    }

    /// Bytes that the process has touched.
    fn resident(&self) -> usize {
        let maps = fs::read_to_string(format!("/proc/{}/smaps", self.process)).unwrap();
        let mut lines = maps.lines();
        let mut bytes = 0;
        while lines.any(|line| self.is_of(line)) {
            let kib = lines.find_map(|line| line.strip_prefix("Rss:")?.trim().split(' ').next());
            bytes += kib.unwrap().parse::<usize>().unwrap() << 10;
        }
        bytes
    }
}

/// Bytes of the mapping of which this is the line in `/proc/PID/maps`; `None` for another line.
fn size(line: &str) -> Option<usize> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    number(end)?.checked_sub(number(start)?)
}
