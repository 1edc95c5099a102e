use super::*;
use crate::account::{Budget, Limits};
use std::sync::mpsc::{Sender, channel};

/// A reaper of its own for each test, so that they do not count each other's jobs.
fn reaper() -> &'static Reaper {
    Box::leak(Box::default())
}

/// The permit is released when the work is done.
fn job(work: impl FnOnce() + Send + 'static, permit: Option<Permit>) -> Job {
    Job {
        owner: permit.as_ref().map(|permit| permit.account().clone()),
        work: Work::Run(Box::new(move || {
            work();
            drop(permit);
        })),
    }
}

/// A job that ends when the sender is dropped.
fn stuck(permit: Option<Permit>) -> (Sender<()>, Job) {
    let (release, held) = channel::<()>();
    let work = move || {
        let _ = held.recv();
    };
    (release, job(work, permit))
}

fn budget(descriptors: u64) -> Budget {
    Budget::new(
        Limits {
            descriptors,
            numbers: u64::MAX,
            mapped: u64::MAX,
            mapped_each: u64::MAX,
        },
        2,
    )
}

const LONG: Duration = Duration::from_secs(60);

fn wait_until(condition: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
}

#[test]
fn jobs_run_behind_stuck_ones() {
    let reaper = reaper();
    let (first, one) = stuck(None);
    let (second, two) = stuck(None);
    reaper.submit(one);
    reaper.submit(two);
    let (done, finished) = channel();
    for n in 0..1000 {
        let done = done.clone();
        reaper.submit(job(move || done.send(n).unwrap(), None));
    }
    // A job that takes longer than PATIENCE, as on a busy machine, is overtaken by the next ones.
    let mut order: Vec<_> = (0..1000)
        .map(|_| finished.recv_timeout(LONG).unwrap())
        .collect();
    order.sort_unstable();
    assert!(order.into_iter().eq(0..1000));
    // The last one may not have been counted yet.
    assert!(!reaper.drain(Duration::from_millis(1)));
    // More, if this machine is busy.
    assert!(reaper.lock().stuck >= 2);
    drop((first, second));
    assert!(reaper.drain(LONG));
    assert_eq!(reaper.lock().finished, 1002);
}

#[test]
fn one_account_cannot_use_up_the_threads() {
    let reaper = reaper();
    let budget = budget(1000);
    let account = budget.account();
    let mut held = Vec::new();
    for _ in 0..2 * MAX_THREADS {
        let (release, job) = stuck(Some(account.take_descriptors(1).unwrap()));
        reaper.submit(job);
        held.push(release);
    }
    let (done, finished) = channel();
    let other = budget.account().take_descriptors(1).unwrap();
    reaper.submit(job(move || done.send(()).unwrap(), Some(other)));
    finished.recv_timeout(LONG).unwrap();
    let state = reaper.lock();
    assert!(state.running.len() <= MAX_STUCK_EACH + 1);
    drop(state);
    assert_eq!(account.descriptors(), 2 * MAX_THREADS as u64);
    // The other job may have run before the fourth that is stuck.
    wait_until(|| account.is_clogged());
    drop(held);
    assert!(reaper.drain(LONG));
    assert_eq!(account.descriptors(), 0);
    assert!(!account.is_clogged());
}

#[test]
fn no_more_threads_than_the_cap() {
    let reaper = reaper();
    let (held, jobs): (Vec<_>, Vec<_>) = (0..MAX_THREADS + 8).map(|_| stuck(None)).unzip();
    for job in jobs {
        reaper.submit(job);
    }
    wait_until(|| reaper.lock().running.len() == MAX_THREADS);
    assert_eq!(reaper.lock().threads, MAX_THREADS);
    drop(held);
    assert!(reaper.drain(LONG));
}

#[test]
fn a_job_that_panics_is_finished() {
    let reaper = reaper();
    reaper.submit(job(|| panic!("for the test"), None));
    assert!(reaper.drain(LONG));
    assert_eq!(reaper.lock().finished, 1);
}

#[test]
fn a_lingering_socket_is_closed_elsewhere() {
    use rustix::net::sockopt::set_socket_linger;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut receiver, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    let mut sent = 0;
    while let Ok(bytes) = sender.write(&[7; 65536]) {
        sent += bytes;
    }
    set_socket_linger(&sender, Some(LONG)).unwrap();
    let reaper = reaper();
    reaper.submit(Job {
        owner: None,
        work: Work::Close(sender.into(), None),
    });
    // Closing waits until the receiver has taken all.
    assert!(!reaper.drain(Duration::from_millis(50)));
    let mut block = vec![0; 1 << 20];
    while sent > 0 {
        sent -= receiver.read(&mut block).unwrap();
    }
    assert!(reaper.drain(LONG));
}

/// A reaper with another way to start threads.
fn reaper_that(spawn: fn(&'static Reaper) -> io::Result<()>) -> &'static Reaper {
    Box::leak(Box::new(Reaper {
        spawn,
        ..Reaper::default()
    }))
}

#[test]
fn threads_are_started_without_the_lock() {
    let reaper = reaper_that(|reaper| {
        // Another thread is not kept from submitting meanwhile.
        let (done, submitted) = channel();
        std::thread::spawn(move || {
            reaper.submit(job(|| {}, None));
            done.send(())
        });
        submitted.recv_timeout(LONG).map_err(io::Error::other)?;
        (Reaper::default().spawn)(reaper)
    });
    reaper.submit(job(|| {}, None));
    assert!(reaper.drain(LONG));
    assert!(reaper.lock().finished >= 2);
}

#[test]
fn a_thread_that_cannot_be_started_is_not_counted() {
    static REFUSED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(true);
    let reaper = reaper_that(
        |reaper| match REFUSED.load(std::sync::atomic::Ordering::Relaxed) {
            true => Err(io::ErrorKind::WouldBlock.into()),
            false => (Reaper::default().spawn)(reaper),
        },
    );
    for _ in 0..2 * MAX_THREADS {
        reaper.submit(job(|| {}, None));
    }
    let state = reaper.lock();
    assert_eq!((state.threads, state.starting), (0, false));
    drop(state);
    REFUSED.store(false, std::sync::atomic::Ordering::Relaxed);
    reaper.submit(job(|| {}, None));
    assert!(reaper.drain(LONG));
    assert_eq!(reaper.lock().finished, 2 * MAX_THREADS as u64 + 1);
}

#[test]
fn a_thread_that_was_refused_is_started_without_another_submission() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    static ALLOWED: AtomicUsize = AtomicUsize::new(1);
    let reaper = reaper_that(|reaper| {
        let asked = ASKED.fetch_add(1, Ordering::Relaxed);
        match asked < ALLOWED.load(Ordering::Relaxed) {
            true => (Reaper::default().spawn)(reaper),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    });
    let (held, first) = stuck(None);
    reaper.submit(first);
    // The thread has asked for another one before it runs the job.
    wait_until(|| ASKED.load(Ordering::Relaxed) == 2 && !reaper.lock().starting);
    reaper.submit(job(|| {}, None));
    let finished = || reaper.lock().finished;
    assert_eq!(finished(), 0);
    ALLOWED.store(usize::MAX, Ordering::Relaxed);
    wait_until(|| {
        reaper.retry();
        finished() == 1
    });
    drop(held);
    assert!(reaper.drain(LONG));
}

/// Blocks all threads with jobs of as many accounts as that takes.
fn fill(reaper: &'static Reaper, budget: &Budget) -> Vec<Sender<()>> {
    let accounts = (0..MAX_THREADS.div_ceil(MAX_STUCK_EACH)).map(|_| budget.account());
    let mut held = Vec::new();
    for account in accounts {
        for _ in 0..MAX_STUCK_EACH {
            let (release, job) = stuck(Some(account.take_nothing()));
            reaper.submit(job);
            held.push(release);
        }
    }
    wait_until(|| reaper.lock().running.len() == MAX_THREADS);
    held
}

#[test]
fn jobs_for_which_all_threads_are_stuck_run_when_one_returns() {
    let reaper = reaper();
    let budget = Budget::unlimited();
    let mut held = fill(reaper, &budget);
    let account = budget.account();
    let (done, finished) = channel();
    for n in 0..100 {
        let done = done.clone();
        let permit = account.take_descriptors(1).unwrap();
        reaper.submit(job(move || done.send(n).unwrap(), Some(permit)));
    }
    assert_eq!(account.descriptors(), 100, "they count until they have run");
    assert!(finished.try_recv().is_err());
    held.pop();
    for n in 0..100 {
        assert_eq!(finished.recv_timeout(LONG), Ok(n));
    }
    drop(held);
    assert!(reaper.drain(LONG));
    assert_eq!(reaper.lock().finished, MAX_THREADS as u64 + 100);
}

#[test]
fn no_job_is_dropped_while_all_threads_are_stuck() {
    let reaper = reaper();
    let budget = Budget::unlimited();
    let held = fill(reaper, &budget);
    let [flooding, other] = [budget.account(), budget.account()];
    // More than any table of descriptors that is usual.
    let jobs = (1 << 17) + 1;
    for _ in 0..jobs {
        let permit = flooding.take_descriptors(1).unwrap();
        reaper.submit(job(|| {}, Some(permit)));
    }
    reaper.submit(job(|| {}, Some(other.take_descriptors(1).unwrap())));
    assert_eq!(flooding.descriptors(), jobs);
    drop(held);
    assert!(reaper.drain(LONG));
    assert_eq!(reaper.lock().finished, MAX_THREADS as u64 + jobs + 1);
    assert_eq!((flooding.descriptors(), other.descriptors()), (0, 0));
    let state = reaper.lock();
    assert!(state.queues.is_empty() && state.turns.is_empty());
}

#[test]
fn a_job_waits_for_one_job_of_each_other_account_only() {
    let reaper = reaper();
    let budget = Budget::unlimited();
    // Holds all threads until all jobs have been submitted.
    let held = fill(reaper, &budget);
    let [slow, other] = [budget.account(), budget.account()];
    let (done, order) = channel();
    let submit = |name, account: &Account, lasts| {
        let done = done.clone();
        let work = move || {
            std::thread::sleep(lasts);
            done.send(name).unwrap();
        };
        reaper.submit(job(work, Some(account.take_nothing())));
    };
    for _ in 0..200 {
        submit("slow", &slow, PATIENCE / 5);
    }
    submit("other", &other, Duration::ZERO);
    submit("other", &other, Duration::ZERO);
    drop(held);
    assert!(reaper.drain(LONG));
    let order: Vec<_> = order.try_iter().collect();
    assert_eq!(order.len(), 202);
    let last = order.iter().rposition(|&name| name == "other").unwrap();
    // Two of each; more, if this machine is busy and other threads have gone on.
    assert!(last < 50, "behind {last} jobs");
}

#[test]
fn an_account_is_clogged_until_the_jobs_that_had_to_wait_have_run() {
    let reaper = reaper();
    let account = Budget::unlimited().account();
    let (held, jobs): (Vec<_>, Vec<_>) = (0..MAX_STUCK_EACH)
        .map(|_| stuck(Some(account.take_nothing())))
        .unzip();
    jobs.into_iter().for_each(|job| reaper.submit(job));
    for _ in 0..100 {
        reaper.submit(job(|| {}, Some(account.take_nothing())));
    }
    wait_until(|| account.is_clogged());
    // What comes to an account that is blocked waits as well, and none of it has its turn.
    reaper.submit(job(|| {}, Some(account.take_nothing())));
    assert!(reaper.lock().turns.is_empty());
    drop(held);
    assert!(reaper.drain(LONG));
    assert!(!account.is_clogged());
}
