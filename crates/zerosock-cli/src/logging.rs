//! Log lines: to standard error, as text or as JSON, at a level.

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// The least severe kind of line that is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum LogLevel {
    /// Nothing at all
    Off,
    /// What broke
    Error,
    /// What looks wrong but was dealt with
    Warn,
    /// Starting, stopping, virtual machines coming and going
    Info,
    /// Connections coming and going
    Debug,
    /// Packets
    Trace,
}

/// How a log line is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line, for programs
    Json,
}

/// Starts logging for this process. A level given as a flag wins over the environment's RUST_LOG,
/// and that over the default, `info`.
pub(crate) fn start(level: Option<LogLevel>, format: LogFormat) {
    let filter = match level {
        Some(level) => EnvFilter::default().add_directive(level.filter().into()),
        None => EnvFilter::builder()
            .with_default_directive(LevelFilter::INFO.into())
            .from_env_lossy(),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    // A second start in one process (tests) keeps the first one's settings.
    let _ = match format {
        LogFormat::Text => builder
            .with_ansi(rustix::termios::isatty(std::io::stderr()))
            .try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}

impl LogLevel {
    fn filter(self) -> LevelFilter {
        match self {
            LogLevel::Off => LevelFilter::OFF,
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
            LogLevel::Trace => LevelFilter::TRACE,
        }
    }
}
