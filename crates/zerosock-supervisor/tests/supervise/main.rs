//! A supervisor and its worker processes, each in a process of its own: kills, hostile messages, hangs, deaths
//! in a row, signals, writes, and the service manager.
//!
//! The test program is all three: [`helper_process`] is the supervisor or a worker process when the
//! environment has a scenario. Worker processes report to the test by datagrams.

mod workers;

use std::fs;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, kill_process, pidfd_open, set_parent_process_death_signal,
};
use zerosock_supervisor::{Client, Config, Limits, RestartPolicy, Supervisor};

const LONG: Duration = Duration::from_secs(120);

/// What a scenario changes of the configuration. By default no time limit can end a test.
fn configure(scenario: &str, config: &mut Config) {
    let never = (usize::MAX, Duration::ZERO);
    config.policy = RestartPolicy {
        reduce: never,
        delay: never,
        pause: Duration::ZERO,
    };
    (config.alive_limit, config.start_limit) = (LONG, LONG);
    match scenario {
        "full" => {
            config.limits = Limits {
                entries: 4,
                bytes: 1 << 20,
                descriptors: 2,
            }
        }
        "upgrade" => config.upgrade = Some(std::env::current_exe().unwrap()),
        "hang" => config.alive_limit = Duration::from_millis(300),
        "hang_early" => config.start_limit = Duration::from_secs(2),
        "deaths" => {
            let pause = Duration::from_millis(300);
            config.policy = RestartPolicy {
                reduce: (3, LONG),
                delay: (5, LONG),
                pause,
            };
        }
        _ => {}
    }
}

#[test]
fn helper_process() {
    let Ok(scenario) = std::env::var("SCENARIO") else {
        return;
    };
    if Client::is_supervised() {
        workers::run(&scenario);
    }
    // A test that is killed leaves no supervisor behind.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(false)
        .init();
    let argv = std::env::args_os().collect();
    let mut config = Config::new("/proc/self/exe", argv);
    configure(&scenario, &mut config);
    let supervisor = Supervisor::new(config).unwrap();
    std::process::exit(supervisor.run().unwrap());
}

/// A running supervisor. Its worker process dies with it.
struct Running {
    dir: tempfile::TempDir,
    reports: UnixDatagram,
    process: Child,
}

impl Running {
    fn start(scenario: &str) -> Running {
        Running::start_with(scenario, |_, _| {})
    }

    fn start_with(scenario: &str, prepare: impl FnOnce(&mut Command, PathBuf)) -> Running {
        let dir = tempfile::tempdir().unwrap();
        let reports = UnixDatagram::bind(dir.path().join("reports")).unwrap();
        reports.set_read_timeout(Some(LONG)).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["helper_process", "--exact", "--nocapture"]);
        command.env("SCENARIO", scenario).env("DIR", dir.path());
        command.stderr(fs::File::create(dir.path().join("log")).unwrap());
        command.stdout(fs::File::create(dir.path().join("out")).unwrap());
        prepare(&mut command, dir.path().to_owned());
        let process = command.spawn().unwrap();
        Running {
            dir,
            reports,
            process,
        }
    }

    fn report(&self) -> String {
        let mut buffer = [0; 4096];
        let length = self.reports.recv(&mut buffer);
        let length = length.unwrap_or_else(|error| panic!("no report: {error}\n{}", self.log()));
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.process.id()))
            .unwrap()
            .count()
    }

    /// Waits for the end, and returns the exit code.
    fn exit_code(&mut self) -> i32 {
        wait_for_end(Pid::from_child(&self.process));
        self.process.wait().unwrap().code().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn wait_for_end(process: Pid) {
    let Ok(process) = pidfd_open(process, PidfdFlags::empty()) else {
        return;
    };
    let mut fds = [rustix::event::PollFd::new(
        &process,
        rustix::event::PollFlags::IN,
    )];
    let timeout = LONG.try_into().unwrap();
    assert_eq!(
        rustix::event::poll(&mut fds, Some(&timeout)),
        Ok(1),
        "the process does not end"
    );
}

/// What `count` reports at its start: the process, the number that each batch gives to two entries, and how
/// many batches its predecessors have noted as sent.
fn started(report: &str) -> (Pid, u64, u64) {
    let words: Vec<_> = report.split(' ').collect();
    assert_eq!(
        (words[0], words[2]),
        ("started", words[3]),
        "half of a batch: {report}"
    );
    let process = Pid::from_raw(words[1].parse().unwrap()).unwrap();
    (
        process,
        words[2].parse().unwrap(),
        words[4].parse().unwrap(),
    )
}

#[test]
fn hundred_kills_lose_no_batch_and_leak_no_descriptor() {
    let running = Running::start("count");
    let (mut worker, ..) = started(&running.report());
    let (mut descriptors, mut number, mut noted) = (0, 0, 0);
    for kill in 0..100_u64 {
        // A random moment: between 0 and 4 ms after the start.
        std::thread::sleep(Duration::from_micros(kill * 7919 % 4000));
        kill_process(worker, Signal::KILL).unwrap();
        (worker, number, noted) = started(&running.report());
        // A worker process notes a batch after it has sent it, so each kill can leave one unnoted.
        assert!(
            (noted..=noted + kill + 1).contains(&number),
            "{noted} sent, {number} in the store"
        );
        if kill == 10 {
            descriptors = settled(&running, usize::MAX);
        }
    }
    assert!(noted > 100 && number > 100, "{noted} batches");
    assert_eq!(settled(&running, descriptors), descriptors);
}

/// Lets the worker process pause, and waits until the supervisor has closed what it no longer holds.
fn settled(running: &Running, expected: usize) -> usize {
    fs::write(running.dir.path().join("pause"), "").unwrap();
    assert_eq!(running.report(), "paused");
    let deadline = Instant::now() + Duration::from_secs(10);
    let (mut last, mut same) = (0, 0);
    while same < 20 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
        let now = running.descriptors();
        same = if now == last { same + 1 } else { 0 };
        last = now;
        if now == expected {
            break;
        }
    }
    fs::remove_file(running.dir.path().join("pause")).unwrap();
    last
}

#[test]
fn hostile_messages_end_that_worker_process_and_change_nothing() {
    let mut running = Running::start("hostile");
    let count = workers::hostile_messages().len();
    for turn in 0..=count {
        let expected = if turn == 0 {
            String::new()
        } else {
            format!("turn={turn}")
        };
        assert_eq!(
            running.report(),
            expected,
            "after message {turn}\n{}",
            running.log()
        );
    }
    assert_eq!(running.exit_code(), 7);
    assert_eq!(
        running.log().matches("broke a rule").count(),
        count,
        "{}",
        running.log()
    );
}

#[test]
fn full_store_refuses_a_batch_and_keeps_its_entries() {
    let mut running = Running::start("full");
    assert_eq!(running.report(), "");
    assert_eq!(running.report(), "refused");
    // The same batch past the client's check.
    assert_eq!(running.report(), "a=1 b=2");
    assert_eq!(running.exit_code(), 0);
    assert!(running.log().contains("store of the supervisor is full"));
}

#[test]
fn worker_process_that_hangs_is_replaced() {
    for scenario in ["hang", "hang_early"] {
        let mut running = Running::start(scenario);
        assert_eq!(running.report(), "");
        assert_eq!(running.report(), "a=1");
        assert_eq!(running.exit_code(), 0);
        assert!(running.log().contains("makes no progress"));
    }
}

#[test]
fn third_death_leaves_listening_sockets_and_the_fifth_delays() {
    let mut running = Running::start("deaths");
    for expected in [
        "",
        "listen/a=1 state=2",
        "listen/a=1 state=2",
        "listen/a=1",
        "listen/a=1",
    ] {
        assert_eq!(running.report(), expected);
    }
    let fifth = Instant::now();
    assert_eq!(running.report(), "listen/a=1");
    assert!(
        fifth.elapsed() >= Duration::from_millis(290),
        "{:?}",
        fifth.elapsed()
    );
    assert_eq!(running.exit_code(), 5);
    assert!(running.log().contains("gets only listening sockets"));
}

#[test]
fn end_before_ready_ends_the_supervisor_with_its_code() {
    assert_eq!(Running::start("misconfigured").exit_code(), 3);
    assert_eq!(Running::start("killed_early").exit_code(), 128 + 9);
}

#[test]
fn signals_are_passed_on_and_the_exit_code_comes_back() {
    let mut running = Running::start("signals");
    assert_eq!(running.report(), "ready");
    for (signal, name) in [(Signal::HUP, "SIGHUP"), (Signal::USR1, "SIGUSR1")] {
        running.signal(signal);
        assert_eq!(running.report(), name);
    }
    // No effect.
    running.signal(Signal::USR2);
    running.signal(Signal::TERM);
    assert_eq!(running.report(), "SIGTERM");
    assert_eq!(running.exit_code(), 11);
}

/// The number of the process that says that it serves.
fn serves(report: &str) -> Pid {
    let id = report
        .strip_prefix("serves ")
        .unwrap_or_else(|| panic!("{report}"));
    Pid::from_raw(id.parse().unwrap()).unwrap()
}

#[test]
fn an_upgrade_takes_over_or_leaves_the_worker_process_as_it_was() {
    let running = Running::start("upgrade");
    let next = |text: &str| fs::write(running.dir.path().join("next"), text).unwrap();
    assert_eq!(running.report(), "");
    let mut worker = serves(&running.report());
    for way in ["dies", "hangs", "breaks a rule"] {
        next(way);
        running.signal(Signal::USR2);
        // It gets everything, and does not take over.
        assert_eq!(running.report(), "n/0= handover/state=1", "{way}");
        assert_eq!(running.report(), "goes on", "{}", running.log());
    }
    next("takes over");
    let mut entries = "n/0=".to_owned();
    for count in 1..4 {
        running.signal(Signal::USR2);
        let expected = format!("{entries} handover/state=1");
        assert_eq!(running.report(), expected, "{}", running.log());
        let successor = serves(&running.report());
        assert_ne!(successor, worker);
        wait_for_end(worker);
        worker = successor;
        entries = format!("{entries} n/{count}=");
    }
    // One that is killed has a successor, which gets nothing that was meant for an upgrade.
    kill_process(worker, Signal::KILL).unwrap();
    assert_eq!(running.report(), entries);
    serves(&running.report());
    entries = format!("{entries} n/4=");
    next("dies meanwhile");
    running.signal(Signal::USR2);
    assert_eq!(running.report(), entries);
    serves(&running.report());
}

#[test]
fn batch_sent_before_the_entries_were_read_counts() {
    let mut running = Running::start("hasty");
    assert_eq!(running.report(), "filled");
    assert_eq!(running.report(), "500 entries and hasty");
    assert_eq!(running.exit_code(), 0);
}

#[test]
fn writes_reach_the_peer_or_disconnect_it() {
    let mut running = Running::start("write");
    assert_eq!(running.report(), "written");
    assert_eq!(running.exit_code(), 0, "{}", running.log());
}

#[test]
fn service_manager_hears_of_states_and_progress_from_the_supervisor_only() {
    let mut manager = None;
    let running = Running::start_with("states", |command, dir| {
        manager = Some(UnixDatagram::bind(dir.join("manager")).unwrap());
        command
            .env("NOTIFY_SOCKET", dir.join("manager"))
            .env("WATCHDOG_USEC", "200000");
    });
    let manager = manager.unwrap();
    manager.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(running.report(), "no NOTIFY_SOCKET, no WATCHDOG_USEC");
    let (mut watchdogs, mut ready) = (0, false);
    while watchdogs < 3 || !ready {
        let mut buffer = [0; 256];
        let length = manager.recv(&mut buffer).unwrap();
        match std::str::from_utf8(&buffer[..length]).unwrap().trim_end() {
            "WATCHDOG=1" => watchdogs += 1,
            text => {
                assert_eq!(text, "READY=1\nSTATUS=up");
                ready = true;
            }
        }
    }
}

#[test]
fn worker_process_dies_with_its_supervisor() {
    let running = Running::start("idle");
    let worker = Pid::from_raw(running.report().parse().unwrap()).unwrap();
    running.signal(Signal::KILL);
    wait_for_end(worker);
}
