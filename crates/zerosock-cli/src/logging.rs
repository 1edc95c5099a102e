//! Log lines on standard error, as text or JSON.

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// The least severe level that is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum LogLevel {
    /// Nothing at all
    Off,
    /// Failures
    Error,
    /// Problems that were handled
    Warn,
    /// Start and stop, virtual machines added and removed
    Info,
    /// Connections opened and closed
    Debug,
    /// Packets
    Trace,
}

/// Format of a log line.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Text
    Text,
    /// One JSON object per line
    Json,
}

/// Starts logging for this process. A level given as a flag takes precedence over RUST_LOG, and
/// that over the default, `info`.
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
    // A second call in one process (tests) keeps the first settings.
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
