//! Entry point of the fuzz target `config` (docs/fuzzing.md).

use std::sync::OnceLock;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::serve::args::ServeArgs;
use crate::serve::checked;

/// Reads and validates the file with this path, which is always the same, as `serve --config` does. Settings that are
/// valid are so a second time, and an error has one text.
pub fn config(path: &str) {
    static ARGUMENTS: OnceLock<ServeArgs> = OnceLock::new();
    let arguments = ARGUMENTS.get_or_init(|| {
        let cli = Cli::try_parse_from(["zerosock", "serve", "--config", path]);
        match cli.map(|cli| cli.command) {
            Ok(Command::Serve(args)) => *args,
            _ => unreachable!("the arguments are valid"),
        }
    });
    let read = || checked(arguments.clone());
    assert_eq!(read(), read(), "two results for one file");
}
