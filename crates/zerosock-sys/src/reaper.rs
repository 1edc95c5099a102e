//! Threads for system calls that a peer can make wait.
//!
//! close(2) of a descriptor that a peer has sent can sleep: a TCP socket lingers for as long as its
//! sender chose, a file on FUSE waits for its server without a limit, not even SIGKILL ends it. The
//! last munmap(2) of a peer's memory frees its pages, which takes 150 ms per GiB. The reaper makes
//! these calls, so that no thread that serves several peers does.
//!
//! # Invariants
//! - [`close`] and [`run`] never wait for a job: they append to a queue. No thread is started, and
//!   no job run, under the queue's lock.
//! - Each account has a queue, and jobs without an account have one more. The queues take turns,
//!   one job each: a job waits for the earlier jobs of its queue, and for one job of each other
//!   queue before each of them.
//! - While there are jobs, one thread works on them. A job that takes longer than [`PATIENCE`]
//!   counts as stuck and another thread goes on with the rest, up to [`MAX_THREADS`].
//! - A peer whose jobs block [`MAX_STUCK_EACH`] threads gets no further thread: its later jobs wait
//!   until one of them returns. So one peer cannot use up the threads. From a peer with many such
//!   jobs nothing is received any more ([`Account::is_clogged`]).
//! - A job holds its [`Permit`] until it is done: a descriptor that cannot be closed counts against
//!   the peer that sent it.
//! - No job is dropped. A job that waits holds a descriptor, a mapping or an allocation, so the
//!   limits on those bound the queues.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use crate::account::{Account, Permit};

/// How long a job may take before another thread goes on with the next.
pub const PATIENCE: Duration = Duration::from_millis(10);
/// Most threads.
pub const MAX_THREADS: usize = 64;
/// Most threads that wait in jobs of one account at a time.
pub const MAX_STUCK_EACH: usize = 4;

/// What the reaper has done since the process began, and does now.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct ReaperStats {
    /// Jobs that were finished.
    pub finished: u64,
    /// Jobs that took longer than [`PATIENCE`] and were noticed while another job waited.
    pub stuck: u64,
    /// Threads.
    pub threads: usize,
    /// Jobs that wait or are under way.
    pub pending: usize,
    /// For how long the oldest of those under way has been.
    pub longest: Duration,
}

/// Closes a descriptor that came from a peer, or a socket that a peer can reach. `permit` is
/// released when it is closed.
pub fn close(fd: OwnedFd, permit: Option<Permit>) {
    REAPER.submit(Job {
        owner: permit.as_ref().map(|permit| permit.account().clone()),
        work: Work::Close(fd, permit),
    });
}

/// Runs something that can wait on an object of the peer that has this account.
pub fn run(work: impl FnOnce() + Send + 'static, account: Option<&Account>) {
    REAPER.submit(Job {
        owner: account.cloned(),
        work: Work::Run(Box::new(work)),
    });
}

/// Starts a thread if jobs wait, all threads are stuck, and the system refused a thread before. To
/// be called now and then: without it the next submission does so.
pub fn retry() {
    REAPER.retry();
}

/// Waits until every job that was submitted has been finished, for at most `limit`. False: some
/// are still under way.
pub fn drain(limit: Duration) -> bool {
    REAPER.drain(limit)
}

/// What the reaper has done and does.
pub fn stats() -> ReaperStats {
    let state = REAPER.lock();
    ReaperStats {
        finished: state.finished,
        stuck: state.stuck,
        threads: state.threads,
        pending: state.pending(),
        longest: state.longest(),
    }
}

static REAPER: LazyLock<Reaper> = LazyLock::new(Reaper::default);

/// Threads that wait for a job beside the one that works: more than these end.
const SPARE_THREADS: usize = 2;
/// Bytes of stack of a thread; its jobs are single system calls.
const STACK: usize = 256 << 10;

struct Job {
    /// The account of the peer that it is for.
    owner: Option<Account>,
    work: Work,
}

enum Work {
    Close(OwnedFd, Option<Permit>),
    Run(Box<dyn FnOnce() + Send>),
}

impl Job {
    fn carry_out(self) {
        match self.work {
            Work::Close(fd, permit) => {
                drop(fd);
                drop(permit);
            }
            // A panic costs this job only, not the thread that is counted.
            Work::Run(work) => {
                let _ = catch_unwind(AssertUnwindSafe(work));
            }
        }
    }
}

struct Reaper {
    /// Starts a thread that calls [`Reaper::work`].
    spawn: fn(&'static Reaper) -> io::Result<()>,
    state: Mutex<State>,
    submitted: Condvar,
    /// The last job has been finished.
    idle: Condvar,
}

impl Default for Reaper {
    fn default() -> Reaper {
        let spawn = |reaper: &'static Reaper| {
            let thread = Builder::new().name("zerosock-reaper".into());
            let thread = thread.stack_size(STACK).spawn(|| reaper.work());
            thread.map(drop)
        };
        Reaper {
            spawn,
            state: Mutex::default(),
            submitted: Condvar::new(),
            idle: Condvar::new(),
        }
    }
}

#[derive(Default)]
struct State {
    /// Jobs that wait, by the number of their account. No queue is empty.
    queues: HashMap<Owner, VecDeque<Job>>,
    /// The owners of the queues, in the order of their turns, except accounts that block as many
    /// threads as they may.
    turns: VecDeque<Owner>,
    /// Jobs in all queues.
    queued: usize,
    running: Vec<Running>,
    threads: usize,
    /// One of them is being started, and looks at the queue then.
    starting: bool,
    /// Threads that wait for a job.
    waiting: usize,
    /// One of the waiting threads wakes by itself when the job under way gets stuck.
    watching: bool,
    last_number: u64,
    finished: u64,
    stuck: u64,
}

/// The number of an account, or none.
type Owner = Option<usize>;

/// A job under way.
struct Running {
    number: u64,
    owner: Owner,
    since: Instant,
    stuck: bool,
}

impl State {
    fn pending(&self) -> usize {
        self.queued + self.running.len()
    }

    fn longest(&self) -> Duration {
        let oldest = self.running.iter().map(|running| running.since).min();
        oldest.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// How long it takes until all jobs under way are finished or stuck; marks those that are
    /// stuck.
    fn until_stuck(&mut self) -> Duration {
        let now = Instant::now();
        let mut longest = Duration::ZERO;
        for running in self.running.iter_mut().filter(|running| !running.stuck) {
            let left = PATIENCE.saturating_sub(now.saturating_duration_since(running.since));
            running.stuck = left.is_zero();
            self.stuck += u64::from(running.stuck);
            longest = longest.max(left);
        }
        longest
    }

    /// Counts a thread that is about to be started, unless there are enough or one is on its way.
    fn count_thread(&mut self) -> bool {
        if self.starting || self.threads >= MAX_THREADS {
            return false;
        }
        self.starting = true;
        self.threads += 1;
        true
    }

    /// Whether the owner blocks as many threads as it may.
    fn is_blocked(&self, owner: Owner) -> bool {
        let running = self.running.iter().filter(|running| running.owner == owner);
        owner.is_some() && running.count() >= MAX_STUCK_EACH
    }

    fn append(&mut self, job: Job) {
        let account = job.owner.clone();
        let owner = account.as_ref().map(Account::number);
        let is_blocked = self.is_blocked(owner);
        let queue = self.queues.entry(owner).or_default();
        queue.push_back(job);
        self.queued += 1;
        match account {
            Some(account) if is_blocked => account.set_deferred(queue.len()),
            _ if queue.len() == 1 => self.turns.push_back(owner),
            _ => {}
        }
    }

    /// The job of the owner that has its turn, now under way.
    fn take(&mut self) -> Option<(u64, Job)> {
        let owner = self.turns.pop_front()?;
        let queue = self.queues.get_mut(&owner)?;
        let job = queue.pop_front()?;
        let left = queue.len();
        self.queued -= 1;
        self.last_number += 1;
        let number = self.last_number;
        self.running.push(Running {
            number,
            owner,
            since: Instant::now(),
            stuck: false,
        });
        let is_blocked = self.is_blocked(owner);
        if left == 0 {
            self.queues.remove(&owner);
        } else if !is_blocked {
            self.turns.push_back(owner);
        }
        if let Some(account) = &job.owner {
            match is_blocked {
                true => account.set_deferred(left),
                false => account.limit_deferred(left),
            }
        }
        Some((number, job))
    }

    fn finish(&mut self, number: u64) {
        self.finished += 1;
        let Some(place) = self.running.iter().position(|r| r.number == number) else {
            return;
        };
        let owner = self.running[place].owner;
        let was_blocked = self.is_blocked(owner);
        self.running.swap_remove(place);
        if was_blocked && self.queues.contains_key(&owner) {
            self.turns.push_back(owner);
        }
    }
}

impl Reaper {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No job runs under the lock, and each change below leaves the lists whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(&'static self, job: Job) {
        let mut state = self.lock();
        state.append(job);
        if state.turns.is_empty() {
            // It waits for a stuck job of its own account.
        } else if state.waiting > 0 {
            // A working thread looks at the queue when it is done, and a watching one when that
            // takes too long.
            if !state.watching || state.running.iter().all(|running| running.stuck) {
                self.submitted.notify_one();
            }
        } else {
            self.start_if_stuck(state);
        }
    }

    fn retry(&'static self) {
        let state = self.lock();
        if !state.turns.is_empty() && state.waiting == 0 {
            self.start_if_stuck(state);
        }
    }

    fn start_if_stuck(&'static self, mut state: MutexGuard<'_, State>) {
        if state.until_stuck().is_zero() && state.count_thread() {
            drop(state);
            self.start_thread();
        }
    }

    /// Starts the thread that has been counted. Where the system refuses, the jobs wait for the
    /// threads that there are, and for the next submission or [`retry`].
    fn start_thread(&'static self) {
        if (self.spawn)(self).is_err() {
            let mut state = self.lock();
            state.starting = false;
            state.threads -= 1;
        }
    }

    fn work(&'static self) {
        let mut state = self.lock();
        state.starting = false;
        loop {
            if !state.turns.is_empty() {
                let wait = state.until_stuck();
                if !wait.is_zero() {
                    state = self.watch(state, wait);
                    continue;
                }
                if let Some((number, job)) = state.take() {
                    let is_last = state.waiting == 0;
                    if !is_last && !state.turns.is_empty() && !state.watching {
                        self.submitted.notify_one();
                    }
                    let start = is_last && state.count_thread();
                    drop(state);
                    if start {
                        self.start_thread();
                    }
                    job.carry_out();
                    state = self.lock();
                    state.finish(number);
                    if state.pending() == 0 {
                        self.idle.notify_all();
                    }
                    continue;
                }
            }
            if state.waiting >= SPARE_THREADS {
                state.threads -= 1;
                return;
            }
            state.waiting += 1;
            let woken = self.submitted.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Waits until the job under way is stuck, or for another thread that does so.
    fn watch<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        wait: Duration,
    ) -> MutexGuard<'a, State> {
        state.waiting += 1;
        let woken = if state.watching {
            self.submitted.wait(state)
        } else {
            state.watching = true;
            let result = self.submitted.wait_timeout(state, wait);
            let result = result.map_err(|error| PoisonError::new(error.into_inner().0));
            result.map(|(mut state, _)| {
                state.watching = false;
                state
            })
        };
        let mut state = woken.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    fn drain(&self, limit: Duration) -> bool {
        let busy = |state: &mut State| state.pending() > 0;
        let result = self.idle.wait_timeout_while(self.lock(), limit, busy);
        let (state, _) = result.unwrap_or_else(PoisonError::into_inner);
        state.pending() == 0
    }
}

#[cfg(test)]
#[path = "reaper_tests.rs"]
mod tests;
