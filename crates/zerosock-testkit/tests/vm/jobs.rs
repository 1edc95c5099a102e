//! Groups of tests in processes of their own, two at a time, so that one group waits while another one
//! computes. Namespaces, environment and output of a group are not those of the others.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write, pipe};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;

use serde::{Deserialize, Serialize};
use zerosock_cli::vm::accel;
use zerosock_cli::vm::children::{self, Guarded};

use crate::lab::zerosock;

/// The argument before the name of the group that a process tests.
pub(crate) const GROUP: &str = "--group";

/// Groups that are tested at once, unless `ZEROSOCK_TEST_JOBS` has another number.
const AT_ONCE: usize = 2;

/// The counts and names of tests that passed, failed or were skipped.
#[derive(Default, Deserialize, Serialize)]
pub(crate) struct Results {
    pub(crate) passed: usize,
    pub(crate) failed: Vec<String>,
    pub(crate) skipped: usize,
    /// Why the process gave up KVM.
    kvm_failure: Option<String>,
}

impl Results {
    fn add(&mut self, other: Results) {
        self.passed += other.passed;
        self.failed.extend(other.failed);
        self.skipped += other.skipped;
        self.kvm_failure = self.kvm_failure.take().or(other.kvm_failure);
    }

    /// Tells them to the process that has started this one, in the last line of the output.
    pub(crate) fn report(mut self) {
        self.kvm_failure = accel::kvm_failure();
        println!("{}", serde_json::to_string(&self).expect("JSON"));
    }
}

/// Tests groups, in this order. Prints the output of each in one piece when it ends.
pub(crate) fn run(groups: Vec<String>, arguments: &[String]) -> Results {
    let at_once = std::env::var("ZEROSOCK_TEST_JOBS");
    let at_once = at_once.map_or(Ok(AT_ONCE), |text| text.parse());
    let at_once = at_once.expect("a number in ZEROSOCK_TEST_JOBS");
    let groups = Mutex::new(VecDeque::from(groups));
    let results = Mutex::new(Results::default());
    let next = || lock(&groups).pop_front();
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(group) = next() {
                    let has_kvm = lock(&results).kvm_failure.is_none();
                    let (output, of_group) = run_one(&group, arguments, has_kvm);
                    let mut results = lock(&results);
                    let mut stdout = std::io::stdout().lock();
                    let written = stdout.write_all(output.as_bytes());
                    written.and_then(|()| stdout.flush()).expect("an output");
                    results.add(of_group);
                }
            });
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tests one group in a process that ends with this thread. Returns its output and results.
fn run_one(group: &str, arguments: &[String], has_kvm: bool) -> (String, Results) {
    let this = std::env::current_exe().expect("the path of this program");
    let (reader, writer) = pipe().expect("a pipe");
    let mut command: Command = children::with_parent_watchdog(zerosock(), &this);
    command.args([GROUP, group]).args(arguments);
    // A guest that does not start under KVM takes seconds to show it.
    if !has_kvm && std::env::var_os("ZEROSOCK_ACCEL").is_none() {
        command.env("ZEROSOCK_ACCEL", "tcg");
    }
    command.stdin(Stdio::null());
    command.stdout(writer.try_clone().expect("a descriptor"));
    command.stderr(writer);
    let mut process = Guarded::spawn(&mut command).expect("a process");
    // It has the other ends of the pipe, which are open as long as it runs.
    drop(command);
    let lines = BufReader::new(reader).split(b'\n').map_while(Result::ok);
    let mut lines: Vec<_> = lines
        .map(|line| String::from_utf8_lossy(&line).into_owned())
        .collect();
    let status = process.child().wait().expect("an exit status");
    let last = lines
        .last()
        .and_then(|line| serde_json::from_str(line).ok());
    let results = match last {
        Some(results) => {
            lines.pop();
            results
        }
        None => {
            lines.push(format!(
                "{group}: the process of these tests ended: {status}"
            ));
            Results {
                failed: vec![group.to_owned()],
                ..Results::default()
            }
        }
    };
    lines.push(String::new());
    (lines.join("\n"), results)
}
