//! The `zerosock` command with the agent of the tests: for guests, and for what starts them.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use zerosock_testkit::guest;

fn main() -> ExitCode {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|first| first == guest::NAME)
    {
        guest::main()
    } else {
        zerosock_cli::main()
    }
}
