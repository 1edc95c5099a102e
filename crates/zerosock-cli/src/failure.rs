//! How a command fails, seen from outside: by the caller's fault or by the world's.

use std::process::ExitCode;

/// Why a command ended early.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// An option is wrong: the text names the option, the value and the fix. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Everything was asked for correctly, but could not be done. Exit code 1.
    #[error("{0}")]
    Runtime(String),
}

impl Failure {
    /// A [`Failure::Usage`] out of anything that says what is wrong.
    pub fn usage(reason: impl ToString) -> Failure {
        Failure::Usage(reason.to_string())
    }

    /// A [`Failure::Runtime`] out of anything that says what went wrong.
    pub fn runtime(reason: impl ToString) -> Failure {
        Failure::Runtime(reason.to_string())
    }

    /// The exit code for `outcome`; a failure is printed on standard error after the program's name.
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
