//! Guests with stock kernels against the device, over QEMU and user-mode Linux.
//!
//! Every kernel boots once, and its scenarios run one after another in two guests of one
//! device. A scenario that hangs costs its guests: they are booted again for the next one. The scenarios
//! of a kernel are a group with a process of its own, and so is each test that boots guests of its own.
//!
//! `cargo test --test vm -- [--list] [PART OF A NAME]...`; the environment can set
//! - `ZEROSOCK_DEVICE`: another device with vhost-device-vsock's command line, to compare,
//! - `ZEROSOCK_GUEST`: the program taken into the guest (a release build is much faster),
//! - `ZEROSOCK_ACCEL`: `kvm` or `tcg`, instead of trying,
//! - `ZEROSOCK_TEST_JOBS`: groups at once, instead of 2,
//! - `ZEROSOCK_TEST_PAIRS`: queue pairs of the device, of processes and of the embedding host,
//! - `ZEROSOCK_ECHO=1`: shows what device and guests print.

#[path = "../behaviour/mod.rs"]
mod behaviour;
mod behaviours;
mod entropy;
mod jobs;
mod lab;
mod net;
mod net_interface;
mod net_migration;
mod net_xdp;
mod scenarios;
mod user_mode;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use jobs::Results;
use lab::{Lab, Skipped};

/// Longer than any scenario takes on a slow machine; a longer one hangs.
const DEADLINE: Duration = Duration::from_secs(300);

/// A scenario in a running lab.
type Scenario = fn(&Lab);

/// A test that runs in a lab: a scenario, or a behaviour between two of its sides.
type InLab = Arc<dyn Fn(&Lab) -> Result<(), Skipped> + Send + Sync>;

/// A scenario that boots its own guest.
type Alone = fn() -> Result<(), Skipped>;

const KERNELS: &[(&str, &str)] = &[
    ("6.1", "linux-image-cloud-amd64"),
    ("6.12", "linux-image-6.12-cloud-amd64"),
];

/// Tests with guests of their own, by group.
const ALONE: &[(&str, &[(&str, Alone)])] = &[
    ("net_migration", net_migration::ALL),
    ("net", net::ALL),
    ("net_xdp", net_xdp::ALL),
    ("net_interface", net_interface::ALL),
    ("user_mode", user_mode::ALL),
    ("entropy", entropy::ALL),
];

/// All tests of a kernel's lab. Those that end guests come last.
fn in_labs(label: &str) -> impl Iterator<Item = (String, InLab)> {
    behaviours::all()
        .chain(scenarios::ALL.iter().map(|(name, run)| in_lab(name, *run)))
        .map(move |(name, run)| (format!("linux_{label}::{name}"), run))
}

/// Whether a group is the scenarios of a kernel, and not a test by itself.
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
    let kernels = KERNELS.iter().map(|(label, package)| {
        let tests = in_labs(label).filter(|(name, _)| chosen(name));
        (*label, *package, tests.collect::<Vec<_>>())
    });
    let kernels: Vec<_> = kernels.filter(|(_, _, tests)| !tests.is_empty()).collect();
    let alone: Vec<_> = alone().filter(|(name, _)| chosen(name)).collect();
    if list {
        let in_labs = kernels.iter().flat_map(|(_, _, tests)| tests);
        let names = in_labs.map(|(name, _)| name);
        names
            .chain(alone.iter().map(|(name, _)| name))
            .for_each(|name| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }

    let start = Instant::now();
    let results = if kernels.len() + alone.len() > 1 {
        // Those with the most tests first.
        let groups = kernels.iter().map(|(label, ..)| format!("linux_{label}::"));
        let groups = groups.chain(alone.into_iter().map(|(name, _)| name));
        jobs::run(groups.collect(), &arguments)
    } else {
        let mut results = Results::default();
        for (label, package, tests) in &kernels {
            kernel(label, package, tests, &mut results);
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

/// Skips if the package has another release, as on other versions of Debian.
fn of_release(label: &str, lab: Lab) -> Result<Lab, Skipped> {
    if lab.release.starts_with(&format!("{label}.")) {
        return Ok(lab);
    }
    let release = &lab.release;
    Err(Skipped(format!("the package has Linux {release} here")))
}

fn in_lab(name: &str, run: Scenario) -> (String, InLab) {
    let run = move |lab: &Lab| {
        run(lab);
        Ok(())
    };
    (name.to_owned(), Arc::new(run))
}

fn kernel(label: &str, package: &str, scenarios: &[(String, InLab)], results: &mut Results) {
    let mut lab: Option<Arc<Lab>> = None;
    for (name, run) in scenarios {
        let ready = match &lab {
            Some(lab) => lab.clone(),
            None => match Lab::start(package).and_then(|lab| of_release(label, lab)) {
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
    let passed = match done.recv_timeout(DEADLINE) {
        Ok(passed) => passed,
        Err(RecvTimeoutError::Timeout) => {
            println!("{name}: no end within {} s", DEADLINE.as_secs());
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
