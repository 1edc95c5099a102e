//! Failures of a command: usage errors and runtime errors.

use std::process::ExitCode;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// An option is wrong: the text names the option, the value and the fix. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// The options are valid, but the command failed. Exit code 1.
    #[error("{0}")]
    Runtime(String),
}

impl Failure {
    /// A [`Failure::Usage`] with this text.
    pub fn usage(reason: impl ToString) -> Failure {
        Failure::Usage(reason.to_string())
    }

    /// A [`Failure::Runtime`] with this text.
    pub fn runtime(reason: impl ToString) -> Failure {
        Failure::Runtime(reason.to_string())
    }

    /// Returns the exit code of `outcome`; prints a failure on standard error after the program's
    /// name.
    pub fn exit_code(program: &str, outcome: Result<(), Failure>) -> ExitCode {
        match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                eprintln!("{program}: {failure}");
                ExitCode::from(match failure {
                    Failure::Usage(_) => 2,
                    Failure::Runtime(_) => 1,
                })
            }
        }
    }
}
