//! Guests with stock kernels against the device, over QEMU and user-mode Linux.
//!
//! Every kernel boots once, and its scenarios run one after another in two guests of one
//! device. A scenario that hangs costs its guests: they are booted again for the next one. The scenarios
//! of a kernel are a group with a process of its own, and so is each test that boots guests of its own.
//!
//! `cargo test --test vm -- [--list] [PART OF A NAME]...`; the environment can set
//! - `ZEROSOCK_DEVICE`: another device with vhost-device-vsock's command line, to compare,
//! - `ZEROSOCK_GUEST`: the program taken into the guest (a release build is much faster),
//! - `ZEROSOCK_SERVE`: the program that serves in the tests of restarts and upgrades, another build of `zerosock`,
//! - `ZEROSOCK_ACCEL`: `kvm` or `tcg`, instead of trying,
//! - `ZEROSOCK_TEST_JOBS`: groups at once, instead of 2,
//! - `ZEROSOCK_RESTARTS`, `ZEROSOCK_UPGRADES`, `ZEROSOCK_UPGRADE_CONNECTIONS`: counts,
//! - `ZEROSOCK_GUEST_MIB`, `ZEROSOCK_GUEST_KILLS`, `ZEROSOCK_GUEST_CYCLES`, `ZEROSOCK_GUEST_REBOOTS`: counts, see
//!   CONTRIBUTING.md,
//! - `ZEROSOCK_ECHO=1`: shows what device and guests print.

#[path = "../behaviour/mod.rs"]
mod behaviour;
mod behaviours;
mod demo;
mod entropy;
mod guest_agent;
mod guest_copies;
mod guest_direct;
mod guest_endpoint;
mod guest_kills;
mod guest_pages;
mod guest_reboots;
mod jobs;
mod kernels;
mod lab;
mod monitor;
mod net;
mod net_interface;
mod net_migration;
mod net_xdp;
mod restarts;
mod scenarios;
mod upgrades;
mod user_mode;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use jobs::Results;
use lab::{Lab, Platform, Skipped};

/// Longer than any scenario takes on a slow machine; a longer one hangs.
const DEADLINE: Duration = Duration::from_secs(300);

/// A scenario in a running lab.
type Scenario = fn(&Lab);

/// A test that runs in a lab: a scenario, or a behaviour between two of its sides.
type InLab = Arc<dyn Fn(&Lab) -> Result<(), Skipped> + Send + Sync>;

/// A scenario that boots its own guest.
type Alone = fn() -> Result<(), Skipped>;

/// Tests with guests of their own, by group. Those that take longest come first.
const ALONE: &[(&str, &[(&str, Alone)])] = &[
    ("net_migration", net_migration::ALL),
    ("net", net::ALL),
    ("net_xdp", net_xdp::ALL),
    ("net_interface", net_interface::ALL),
    ("user_mode", user_mode::ALL),
    ("entropy", entropy::ALL),
    ("demo", demo::ALL),
    ("guest_pages", guest_pages::ALL),
    ("guest_agent", guest_agent::ALL),
    ("guest_endpoint", guest_endpoint::ALL),
    ("guest_copies", guest_copies::ALL),
    ("guest_reboots", guest_reboots::ALL),
    ("guest_kills", guest_kills::ALL),
    ("restarts", restarts::ALL),
    ("upgrades", upgrades::ALL),
];

/// The tests of a lab.
struct LabTests {
    /// Prefix of their names.
    group: &'static str,
    platform: Platform,
    tests: Vec<(String, InLab)>,
}

/// The tests of each kernel, those that end guests last. The group that takes longest comes first. Guests with
/// Linux 6.1 are user-mode Linux, which emulates no processor, where that can show the same.
fn labs() -> [LabTests; 3] {
    let new = behaviours::all()
        .chain(behaviours::with_queue_pairs(false))
        .chain(scenarios::ALL.iter().map(in_lab));
    let old = behaviours::by_user_mode(false).chain(scenarios::by_user_mode(false).map(in_lab));
    let user_mode = behaviours::by_user_mode(true)
        .chain(behaviours::with_queue_pairs(true))
        .chain(scenarios::by_user_mode(true).map(in_lab));
    [
        LabTests::new("linux_6.12::", Platform::Qemu("6.12"), new),
        LabTests::new("linux_6.1::", Platform::Qemu("6.1"), old),
        LabTests::new(
            "linux_6.1_user_mode::",
            Platform::UserMode("6.1"),
            user_mode,
        ),
    ]
}

impl LabTests {
    fn new(
        group: &'static str,
        platform: Platform,
        tests: impl Iterator<Item = (String, InLab)>,
    ) -> LabTests {
        let tests = tests.map(|(name, run)| (format!("{group}{name}"), run));
        LabTests {
            group,
            platform,
            tests: tests.collect(),
        }
    }
}

/// Whether a group is the tests of a lab, and not a test by itself.
fn is_lab(group: &str) -> bool {
    group.ends_with("::")
}

fn alone() -> impl Iterator<Item = (String, Alone)> {
    ALONE.iter().flat_map(|(group, all)| {
        let named = move |(name, run): &(&str, Alone)| (format!("{group}::{name}"), *run);
        all.iter().map(named)
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let list = arguments.iter().any(|word| word == "--list");
    let group = match &*arguments {
        [option, group, ..] if option == jobs::GROUP => Some(group),
        _ => None,
    };
    let filters = || {
        let words = arguments.iter().skip(if group.is_some() { 2 } else { 0 });
        words.filter(|word| !word.starts_with('-'))
    };
    let chosen = |name: &String| {
        let any = filters().next().is_none() || filters().any(|part| name.contains(part));
        let in_group = |group: &String| name == group || is_lab(group) && name.starts_with(group);
        any && group.is_none_or(in_group)
    };
    let mut labs = Vec::from(labs());
    labs.iter_mut()
        .for_each(|lab| lab.tests.retain(|(name, _)| chosen(name)));
    labs.retain(|lab| !lab.tests.is_empty());
    let alone: Vec<_> = alone().filter(|(name, _)| chosen(name)).collect();
    if list {
        let names = labs.iter().flat_map(|lab| &lab.tests).map(|it| &it.0);
        let names = names.chain(alone.iter().map(|it| &it.0));
        names.for_each(|name| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }

    let start = Instant::now();
    let groups = labs.iter().map(|lab| lab.group.to_owned());
    let groups = groups.chain(alone.iter().map(|(name, _)| name.clone()));
    let groups: Vec<_> = groups.collect();
    // The output of a single group can be seen at once.
    let results = if group.is_none() && groups.len() > 1 {
        jobs::run(groups, &arguments)
    } else {
        let mut results = Results::default();
        for lab in &labs {
            run_in_lab(lab, &mut results);
        }
        for (name, run) in alone {
            attempt_or_skip(&name, &mut results, run);
        }
        results
    };
    let failed = !results.failed.is_empty();
    let code = ExitCode::from(u8::from(failed));
    if group.is_some() {
        results.report();
        return code;
    }
    println!(
        "\nvm result: {}. {} passed; {} failed; {} skipped; finished in {:.1}s",
        if failed { "FAILED" } else { "ok" },
        results.passed,
        results.failed.len(),
        results.skipped,
        start.elapsed().as_secs_f64()
    );
    let failed = results.failed.iter();
    failed.for_each(|name| println!("    failed: {name}"));
    code
}

fn in_lab((name, run): &(&'static str, Scenario)) -> (String, InLab) {
    let run = *run;
    let run = move |lab: &Lab| {
        run(lab);
        Ok(())
    };
    ((*name).to_owned(), Arc::new(run))
}

fn run_in_lab(of_lab: &LabTests, results: &mut Results) {
    let mut lab: Option<Arc<Lab>> = None;
    for (name, run) in &of_lab.tests {
        let ready = match &lab {
            Some(lab) => lab.clone(),
            None => match Lab::start(of_lab.platform) {
                Ok(new) => lab.insert(Arc::new(new)).clone(),
                Err(Skipped(reason)) => {
                    println!("SKIPPED {name}: {reason}");
                    results.skipped += 1;
                    continue;
                }
            },
        };
        let (there, run) = (ready.clone(), run.clone());
        if !attempt_or_skip(name, results, move || run(&there)) {
            ready.report();
            // A failed scenario's leftovers must not affect the next one.
            ready.stop();
            lab = None;
        }
    }
}

/// As [`attempt`], for a test that may skip.
fn attempt_or_skip(
    name: &str,
    results: &mut Results,
    run: impl FnOnce() -> Result<(), Skipped> + Send + 'static,
) -> bool {
    let (sender, skipped) = channel();
    let passed = attempt(name, results, move || {
        if let Err(Skipped(reason)) = run() {
            let _ = sender.send(reason);
        }
    });
    if let Ok(reason) = skipped.try_recv() {
        println!("SKIPPED {name}: {reason}");
        results.passed -= 1;
        results.skipped += 1;
    }
    passed
}

/// Runs one scenario on a thread of its own, so that a hanging one ends too.
fn attempt(name: &str, results: &mut Results, run: impl FnOnce() + Send + 'static) -> bool {
    let start = Instant::now();
    let (sender, done) = channel();
    thread::spawn(move || {
        let _ = sender.send(catch_unwind(AssertUnwindSafe(run)).is_ok());
    });
    let deadline = DEADLINE
        .max(guest_reboots::limit())
        .max(guest_kills::limit())
        .max(restarts::limit())
        .max(upgrades::limit());
    let passed = match done.recv_timeout(deadline) {
        Ok(passed) => passed,
        Err(RecvTimeoutError::Timeout) => {
            println!("{name}: no end within {} s", deadline.as_secs());
            false
        }
        Err(RecvTimeoutError::Disconnected) => false,
    };
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "test {name} ... {} ({seconds:.1}s)",
        if passed { "ok" } else { "FAILED" }
    );
    if passed {
        results.passed += 1;
    } else {
        results.failed.push(name.to_owned());
    }
    passed
}
