//! The `zerosock` command with the agent of the tests, for guests and what starts them, and with the long run.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use zerosock_testkit::{guest, soak};

fn main() -> ExitCode {
    let first = std::env::args_os().nth(1).unwrap_or_default();
    if first == guest::NAME {
        guest::main()
    } else if first == soak::NAME {
        soak::main()
    } else {
        zerosock_cli::main()
    }
}
