//! The `zerosock` command: [`zerosock_cli::main`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    zerosock_cli::main()
}
