//! Tests in processes of their own: restrictions that a test applies hold for its whole process.

use std::io::{self, Write};
use std::process::Command;

/// Marks the process that runs a single test.
const CHILD: &str = "ZEROSOCK_TEST_CHILD";

/// Runs the test of this name in a process of its own, and prints its SKIPPED lines.
pub(crate) fn alone(name: &str, test: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        test();
        println!("it ran");
        return;
    }
    let output = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "--nocapture", name])
        .env(CHILD, "1")
        .output()
        .expect("a process");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    let passed = output.status.success() && told.contains("it ran");
    assert!(passed, "{told}{why}");
    for line in why.lines().filter(|line| line.starts_with("SKIPPED ")) {
        let _ = writeln!(io::stderr(), "\n{line}");
    }
}

/// Prints that a test was skipped. `println!` is not shown for passing tests.
pub(crate) fn skip(what: &str, name: &str, why: &dyn std::fmt::Display) {
    let _ = writeln!(io::stderr(), "\nSKIPPED {what}: {name}: {why}");
}
