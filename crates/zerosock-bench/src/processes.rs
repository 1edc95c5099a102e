//! CPU time and memory of processes and of those that they started, read from /proc.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{sched_getaffinity, sched_setaffinity};

use crate::worker;

/// Threads of the kernel that work for sockets; their time is no process's.
const KERNEL_THREADS: [&str; 2] = ["kworker", "ksoftirqd"];

/// Path of this program.
pub(crate) fn own_program() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|error| format!("our own program: {error}"))
}

/// Repeats `attempt` until it succeeds or fails after `patience`: the other process may not listen
/// yet.
pub(crate) fn retry<T, E>(
    patience: Duration,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let deadline = Instant::now() + patience;
    loop {
        match attempt() {
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
            outcome => return outcome,
        }
    }
}

/// Waits until `is_done`, for at most `patience`; returns whether it is.
pub(crate) fn wait_until(
    patience: Duration,
    mut is_done: impl FnMut() -> Result<bool, String>,
) -> Result<bool, String> {
    let deadline = Instant::now() + patience;
    loop {
        match is_done()? {
            false if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
            done => return Ok(done),
        }
    }
}

/// Runs `run` on a thread of its own on core `cpu`, if given. Threads and processes that it starts
/// inherit the core.
pub(crate) fn on_core<T: Send>(
    cpu: Option<usize>,
    run: impl FnOnce() -> Result<T, String> + Send,
) -> Result<T, String> {
    let pinned = || {
        worker::pin(cpu)?;
        run()
    };
    let outcome = thread::scope(|scope| scope.spawn(pinned).join());
    outcome.map_err(|_| "a measuring thread panicked")?
}

/// Runs `start` on the calling thread while it is on core `cpu`, if given: processes and threads that `start`
/// starts stay there.
pub(crate) fn starting_on<T>(cpu: Option<usize>, start: impl FnOnce() -> T) -> Result<T, String> {
    let before = sched_getaffinity(None).map_err(|error| error.to_string())?;
    worker::pin(cpu)?;
    let started = start();
    let restored = sched_setaffinity(None, &before).map_err(|error| error.to_string());
    restored.map(|()| started)
}

/// A child process, in the process group of the bench; killed when dropped.
#[derive(Debug)]
pub(crate) struct KilledOnDrop(pub(crate) Child);

impl KilledOnDrop {
    /// Starts a program with all its threads on core `cpu`, if given.
    pub(crate) fn spawn(mut command: Command, cpu: Option<usize>) -> Result<KilledOnDrop, String> {
        on_core(cpu, || {
            let name = command.get_program().to_string_lossy().into_owned();
            let child = command.spawn();
            child
                .map(KilledOnDrop)
                .map_err(|error| format!("{name}: {error}"))
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// How it has ended, if it has.
    pub(crate) fn status(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // A child of this process, addressed by its handle.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// CPU times at one moment: nanoseconds of each process.
#[derive(Debug, Default)]
pub(crate) struct CpuTimes(HashMap<u32, u64>);

impl CpuTimes {
    /// Times of the processes `roots`, of all their descendants, and of the kernel's threads that
    /// work for sockets.
    pub(crate) fn now(roots: &[u32]) -> Result<CpuTimes, String> {
        let all = Process::all()?;
        let of_kernel = all.iter().filter(|process| process.is_for_sockets());
        let counted = tree(&all, roots).into_iter();
        let counted = counted.chain(of_kernel.map(|process| process.id));
        // A process that has ended meanwhile has no time.
        let times = counted.filter_map(|id| Some((id, cpu_time(id)?)));
        Ok(CpuTimes(times.collect()))
    }

    /// CPU seconds since `before`.
    pub(crate) fn seconds_since(&self, before: &CpuTimes) -> f64 {
        let spent = self.0.iter().map(|(id, time)| {
            let before = before.0.get(id).copied().unwrap_or(0);
            time.saturating_sub(before)
        });
        spent.sum::<u64>() as f64 / 1e9
    }
}

/// Bytes of anonymous and shared memory of a process and its descendants; memory that several
/// processes have counts once. Pages of files do not count: other processes have them too.
pub(crate) fn user_memory(root: u32) -> Result<f64, String> {
    let processes = tree(&Process::all()?, &[root]);
    let mut kib = 0;
    for id in processes {
        let path = format!("/proc/{id}/smaps_rollup");
        let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        for line in text.lines() {
            let mut words = line.split_whitespace();
            if let Some("Pss_Anon:" | "Pss_Shmem:") = words.next() {
                let count = words.next().and_then(|count| count.parse::<u64>().ok());
                kib += count.ok_or_else(|| format!("{path}: {line}"))?;
            }
        }
    }
    Ok(kib as f64 * 1024.0)
}

/// Descriptors that a process and its descendants have open.
pub(crate) fn descriptors(root: u32) -> Result<usize, String> {
    let counts = tree(&Process::all()?, &[root]).into_iter().map(|id| {
        // A process that has ended meanwhile has none.
        fs::read_dir(format!("/proc/{id}/fd")).map_or(0, Iterator::count)
    });
    Ok(counts.sum())
}

/// What /proc/PID/stat says of a process.
struct Process {
    id: u32,
    parent: u32,
    name: String,
}

impl Process {
    fn all() -> Result<Vec<Process>, String> {
        let entries = fs::read_dir("/proc").map_err(|error| format!("/proc: {error}"))?;
        let of_entry = |entry: std::io::Result<fs::DirEntry>| {
            let name = entry.ok()?.file_name();
            let id = name.to_str()?.parse::<u32>().ok()?;
            Process::parse(&fs::read_to_string(format!("/proc/{id}/stat")).ok()?)
        };
        Ok(entries.filter_map(of_entry).collect())
    }

    /// `PID (NAME) STATE PPID ...`, where the name may contain anything.
    fn parse(stat: &str) -> Option<Process> {
        let (id, rest) = stat.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        Some(Process {
            id: id.parse().ok()?,
            parent: rest.split(' ').nth(1)?.parse().ok()?,
            name: name.to_owned(),
        })
    }

    fn is_for_sockets(&self) -> bool {
        // The parent of all of the kernel's threads.
        const KTHREADD: u32 = 2;
        let mut names = KERNEL_THREADS.iter();
        self.parent == KTHREADD && names.any(|name| self.name.starts_with(name))
    }
}

/// The processes `roots` and all their descendants.
fn tree(all: &[Process], roots: &[u32]) -> Vec<u32> {
    let mut found = roots.to_vec();
    let mut at = 0;
    while let Some(&parent) = found.get(at) {
        let children = all.iter().filter(|process| process.parent == parent);
        let new: Vec<u32> = children
            .map(|process| process.id)
            .filter(|id| !found.contains(id))
            .collect();
        found.extend(new);
        at += 1;
    }
    found
}

/// CPU time so far of a process, in seconds: of all its threads, user and system.
pub(crate) fn cpu_seconds(id: u32) -> Result<f64, String> {
    let time = cpu_time(id).ok_or_else(|| format!("/proc/{id}/task: no CPU time"))?;
    Ok(time as f64 / 1e9)
}

/// CPU time so far of the calling thread, in nanoseconds.
pub(crate) fn own_cpu_time() -> Result<u64, String> {
    let path = "/proc/thread-self/schedstat";
    let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let first = text.split_whitespace().next();
    let time = first.and_then(|time| time.parse().ok());
    time.ok_or_else(|| format!("{path}: {text:?}"))
}

/// As [`cpu_seconds`], without the threads whose name begins with `prefix`.
pub(crate) fn cpu_seconds_without(id: u32, prefix: &str) -> Result<f64, String> {
    let others = |name: &str| !name.starts_with(prefix);
    let time = cpu_time_of(id, others).ok_or_else(|| format!("/proc/{id}/task: no CPU time"))?;
    Ok(time as f64 / 1e9)
}

/// CPU time of all threads of a process, in nanoseconds.
fn cpu_time(id: u32) -> Option<u64> {
    cpu_time_of(id, |_| true)
}

/// CPU time of the threads of a process with such names, in nanoseconds. A thread that ends meanwhile does
/// not count.
fn cpu_time_of(id: u32, wanted: impl Fn(&str) -> bool) -> Option<u64> {
    let mut sum = 0;
    for task in fs::read_dir(format!("/proc/{id}/task")).ok()? {
        let path = task.ok()?.path();
        let Ok(name) = fs::read_to_string(path.join("comm")) else {
            continue;
        };
        if !wanted(&name) {
            continue;
        }
        // The first number is the CPU time in nanoseconds (sched-stats in the kernel's
        // documentation); /proc/PID/stat has a resolution of 10 ms.
        let Ok(text) = fs::read_to_string(path.join("schedstat")) else {
            continue;
        };
        sum += text.split_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::process::Pid;
    use rustix::thread::CpuSet;

    use super::*;

    #[test]
    fn a_name_may_contain_what_separates_the_fields() {
        let process = Process::parse("12 (a) b (c) S 7 12 12 0").unwrap();
        assert_eq!(
            (process.id, process.name.as_str(), process.parent),
            (12, "a) b (c", 7)
        );
        assert!(Process::parse("12 nothing").is_none());
    }

    #[test]
    fn what_is_started_on_a_core_stays_there_and_the_starter_does_not() {
        let before = sched_getaffinity(None).unwrap();
        let core = (0..CpuSet::MAX_CPU)
            .rfind(|core| before.is_set(*core))
            .unwrap();
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped());
        let child = starting_on(Some(core), || KilledOnDrop::spawn(command, None));
        let child = child.unwrap().unwrap();
        let after = sched_getaffinity(Some(Pid::from_child(&child.0))).unwrap();
        assert!(after.is_set(core) && after.count() == 1, "{after:?}");
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }

    #[test]
    fn a_threads_time_on_the_processor_is_its_own() {
        let before = own_cpu_time().unwrap();
        let begin = Instant::now();
        // CPU time is updated at scheduler ticks, so run until it changes.
        while own_cpu_time().unwrap() == before {
            assert!(begin.elapsed() < Duration::from_secs(60));
        }
    }

    #[test]
    fn threads_are_left_out_by_their_name() {
        let others = |name: &str| name.starts_with("busy");
        let own = std::process::id();
        thread::scope(|scope| {
            let busy = thread::Builder::new().name("busy 1".into());
            let busy = busy.spawn_scoped(scope, || {
                let before = own_cpu_time().unwrap();
                while own_cpu_time().unwrap() < before + 20_000_000 {}
                let all = cpu_time_of(own, |_| true).unwrap();
                let without = cpu_seconds_without(own, "busy").unwrap();
                (cpu_time_of(own, others).unwrap(), all as f64 / 1e9, without)
            });
            let (busy, all, without) = busy.unwrap().join().unwrap();
            assert!(busy >= 20_000_000);
            assert!(without + 0.01 < all, "{without} of {all}");
        });
    }

    #[test]
    fn threads_that_end_meanwhile_do_not_count() {
        let own = std::process::id();
        let end = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    thread::scope(|inner| inner.spawn(|| {}).join().unwrap());
                }
            });
            let found = (0..2000).all(|_| cpu_time(own).is_some());
            end.store(true, Ordering::Relaxed);
            assert!(found);
        });
    }

    #[test]
    fn descendants_are_found_to_any_depth() {
        let process = |(id, parent)| Process {
            id,
            parent,
            name: String::new(),
        };
        let all: Vec<Process> = [(1, 0), (5, 1), (6, 5), (7, 6), (8, 1)]
            .into_iter()
            .map(process)
            .collect();
        assert_eq!(tree(&all, &[5]), [5, 6, 7]);
        assert_eq!(tree(&all, &[8, 6]), [8, 6, 7]);
    }

    /// A shell with a busy child.
    #[test]
    fn the_time_of_a_busy_child_counts() {
        let mut shell = Command::new("sh")
            .args(["-c", "(while :; do :; done) & cat; kill $!"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let before = CpuTimes::default();
        let deadline = Instant::now() + Duration::from_secs(60);
        let own = || cpu_time(shell.id()).unwrap() as f64 / 1e9;
        let of_tree = || {
            let all = Process::all().unwrap();
            let ids = tree(&all, &[shell.id()]);
            let times = ids.into_iter().filter_map(|id| Some((id, cpu_time(id)?)));
            CpuTimes(times.collect()).seconds_since(&before)
        };
        while of_tree() < own() + 0.05 {
            assert!(Instant::now() < deadline, "the child got no time");
            thread::yield_now();
        }
        assert!(CpuTimes::now(&[shell.id()]).unwrap().seconds_since(&before) > 0.05);
        assert!(user_memory(shell.id()).unwrap() > 0.0);
        assert!(descriptors(shell.id()).unwrap() >= 3);
        drop(shell.stdin.take());
        shell.wait().unwrap();
    }
}
