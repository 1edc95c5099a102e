//! How a subcommand fails, seen from outside: by the caller's fault or by the world's.

/// Why a subcommand ended early. `main` maps it to an exit code and prints it on one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// An option is wrong: the text names the option, the value and the fix. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Everything was asked for correctly, but could not be done. Exit code 1.
    #[error("{0}")]
    Runtime(String),
}

impl Failure {
    /// A [`Failure::Usage`] out of anything that says what is wrong.
    pub(crate) fn usage(reason: impl ToString) -> Failure {
        Failure::Usage(reason.to_string())
    }

    /// A [`Failure::Runtime`] out of anything that says what went wrong.
    pub(crate) fn runtime(reason: impl ToString) -> Failure {
        Failure::Runtime(reason.to_string())
    }
}
