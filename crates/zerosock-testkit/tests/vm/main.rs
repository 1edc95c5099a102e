//! Guests with stock kernels against the device, over QEMU and user-mode Linux.
//!
//! Every kernel boots once, and its scenarios run one after another in two guests of one
//! device. A scenario that hangs costs its guests: they are booted again for the next one.
//!
//! `cargo test --test vm -- [--list] [PART OF A NAME]...`; the environment can set
//! - `ZEROSOCK_DEVICE`: another device with vhost-device-vsock's command line, to compare,
//! - `ZEROSOCK_GUEST`: the program taken into the guest (a release build is much faster),
//! - `ZEROSOCK_ACCEL`: `kvm` or `tcg`, instead of trying,
//! - `ZEROSOCK_TEST_PAIRS`: queue pairs of the device, of processes and of the embedding host,
//! - `ZEROSOCK_ECHO=1`: shows what device and guests print.

#[path = "../behaviour/mod.rs"]
mod behaviour;
mod behaviours;
mod entropy;
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

use lab::{Lab, Skipped};

/// Longer than any scenario takes on a slow machine; a longer one hangs.
const DEADLINE: Duration = Duration::from_secs(180);

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

#[derive(Default)]
struct Results {
    passed: usize,
    failed: Vec<String>,
    skipped: usize,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let list = arguments.iter().any(|word| word == "--list");
    let filters: Vec<&String> = arguments
        .iter()
        .filter(|word| !word.starts_with('-'))
        .collect();
    let chosen = |name: &str| filters.is_empty() || filters.iter().any(|part| name.contains(*part));

    let start = Instant::now();
    let mut results = Results::default();
    for (label, package) in KERNELS {
        // Scenarios that end guests come last.
        let scenarios: Vec<(String, InLab)> = behaviours::all()
            .chain(scenarios::ALL.iter().map(|(name, run)| in_lab(name, *run)))
            .map(|(name, run)| (format!("linux_{label}::{name}"), run))
            .filter(|(name, _)| chosen(name))
            .collect();
        if list {
            scenarios
                .iter()
                .for_each(|(name, _)| println!("{name}: test"));
        } else {
            kernel(label, package, &scenarios, &mut results);
        }
    }
    let groups = [
        ("user_mode", user_mode::ALL),
        ("entropy", entropy::ALL),
        ("net", net::ALL),
        ("net_interface", net_interface::ALL),
        ("net_migration", net_migration::ALL),
        ("net_xdp", net_xdp::ALL),
    ];
    let alone_tests = groups.iter().flat_map(|(group, all)| {
        let named = move |(name, run): &(&str, Alone)| (format!("{group}::{name}"), *run);
        all.iter().map(named)
    });
    let alone_tests = alone_tests.filter(|(name, _)| chosen(name));
    for (name, run) in alone_tests {
        match list {
            true => println!("{name}: test"),
            false => {
                attempt_or_skip(&name, &mut results, run);
            }
        }
    }
    if list {
        return ExitCode::SUCCESS;
    }
    println!(
        "\nvm result: {}. {} passed; {} failed; {} skipped; finished in {:.1}s",
        if results.failed.is_empty() {
            "ok"
        } else {
            "FAILED"
        },
        results.passed,
        results.failed.len(),
        results.skipped,
        start.elapsed().as_secs_f64()
    );
    results
        .failed
        .iter()
        .for_each(|name| println!("    failed: {name}"));
    if results.failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
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
