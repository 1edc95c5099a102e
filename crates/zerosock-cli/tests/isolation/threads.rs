//! States of the daemon's threads, from /proc.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::process::wait_until;

/// System calls in which a peer's object can block.
const HELD_IN: [i64; 3] = [libc::SYS_close, libc::SYS_write, libc::SYS_munmap];
/// Threads that may be blocked.
pub(crate) const REAPER: &str = "zerosock-reaper";
/// The thread that may be blocked by its own VM.
pub(crate) const CALL: &str = "zerosock-call";
/// A thread counts as blocked after this time in one call.
const SEEN_FOR: Duration = Duration::from_millis(100);

/// A thread that sleeps in a system call on an object of the attacker.
#[derive(Debug)]
pub(crate) struct Held {
    task: PathBuf,
    name: String,
    /// Number and arguments of the call, stack and instruction pointer.
    call: String,
}

impl Held {
    /// Waits for a thread of this process that sleeps in one of the calls, and requires that the
    /// first one has this name.
    pub(crate) fn wait(process: u32, name: &str) -> Held {
        let mut seen: Option<(Instant, Held)> = None;
        wait_until(&format!("a {name} thread that is held"), || {
            let now = tasks(process).into_iter().find_map(|task| held(&task));
            let same = |(_, before): &(Instant, Held)| {
                now.as_ref()
                    .is_some_and(|now| (&now.task, &now.call) == (&before.task, &before.call))
            };
            if !seen.as_ref().is_some_and(same) {
                seen = now.map(|held| (Instant::now(), held));
            }
            seen.as_ref()
                .is_some_and(|(since, _)| since.elapsed() >= SEEN_FOR)
        });
        let (_, held) = seen.unwrap();
        assert_eq!(held.name, name, "{held:?} is held by the attacker");
        held
    }

    /// Still asleep, in the same call. A signal wakes the thread for a moment, within the call.
    pub(crate) fn check(&self) {
        wait_until(&format!("{self:?} asleep as before"), || {
            held(&self.task).is_some_and(|held| held.call == self.call)
        });
    }

    /// By the letters of proc(5).
    pub(crate) fn state(&self) -> Option<char> {
        state(&self.task)
    }

    pub(crate) fn wait_for_end(&self) {
        wait_until("the held thread to go on", || {
            held(&self.task).is_none_or(|held| held.call != self.call)
        });
    }
}

/// Number of threads of this name that sleep in one of the calls.
pub(crate) fn count_held(process: u32, name: &str) -> usize {
    let held = tasks(process).into_iter().filter_map(|task| held(&task));
    held.filter(|held| held.name == name).count()
}

pub(crate) fn tasks(process: u32) -> Vec<PathBuf> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks.filter_map(|task| Some(task.ok()?.path())).collect()
}

pub(crate) fn name(task: &Path) -> Option<String> {
    let name = fs::read_to_string(task.join("comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// Its state, by the letters of proc(5).
pub(crate) fn state(task: &Path) -> Option<char> {
    let stat = fs::read_to_string(task.join("stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

/// `None` also for a thread that ends meanwhile.
fn held(task: &Path) -> Option<Held> {
    // "running", or numbers: those of a thread that sleeps.
    let call = fs::read_to_string(task.join("syscall")).ok()?;
    let number: i64 = call.split(' ').next()?.trim().parse().ok()?;
    let held = HELD_IN.contains(&number) && matches!(state(task)?, 'S' | 'D');
    held.then(|| Held {
        task: task.to_owned(),
        name: name(task).unwrap_or_default(),
        call,
    })
}
