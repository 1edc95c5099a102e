//! Log lines on standard error, as text or JSON. A thread writes them, so that no other thread waits for
//! the reader of standard error.

mod queue;

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;

use clap::{Args, ValueEnum};
use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::fmt::writer::BoxMakeWriter;

use self::queue::Queue;

/// The least severe level that is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum LogLevel {
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
enum LogFormat {
    /// Text
    Text,
    /// One JSON object per line
    Json,
}

/// The log of this process. Dropping it waits until all lines are written, at most for 2 s.
#[must_use = "the last lines are written when it is dropped"]
pub(crate) struct Logging(Option<Queue>);

impl Drop for Logging {
    fn drop(&mut self) {
        if let Some(queue) = &self.0 {
            queue.flush();
        }
    }
}

/// The flags of commands that log.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Log")]
pub(crate) struct LogFlags {
    /// How much to log to standard error [default: info, or RUST_LOG]
    #[arg(long, value_enum, value_name = "LEVEL")]
    log_level: Option<LogLevel>,

    /// How to write log lines
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

/// Starts logging for this process. A level given as a flag takes precedence over RUST_LOG, and
/// that over the default, `info`.
pub(crate) fn start(flags: &LogFlags) -> Logging {
    let filter = match flags.log_level {
        Some(level) => EnvFilter::default().add_directive(level.filter().into()),
        None => EnvFilter::builder()
            .with_default_directive(LevelFilter::INFO.into())
            .from_env_lossy(),
    };
    // Not `std::io::Stderr`, whose lock would make other threads wait that print an error.
    let output = std::io::stderr().as_fd().try_clone_to_owned();
    let queue = output.and_then(|output| Queue::start(File::from(output), report_dropped));
    let queue = queue.ok();
    let writer = match queue.clone() {
        Some(queue) => BoxMakeWriter::new(move || queue.clone()),
        None => BoxMakeWriter::new(std::io::stderr),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer);
    // A second call in one process (tests) keeps the first settings.
    let _ = match flags.log_format {
        LogFormat::Text => builder
            .with_target(false)
            .fmt_fields(debug_fn(write_field).delimited(" "))
            .with_ansi(rustix::termios::isatty(std::io::stderr()))
            .try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    Logging(queue)
}

/// Writes a field of a text line. Values that are empty or have blanks, quotes, `=` or control characters are
/// quoted, so that a program can split the line.
fn write_field(to: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    if field.name() == "message" {
        return write!(to, "{value:?}");
    }
    let value = format!("{value:?}");
    write!(to, "{}={}", field.name(), quote(&value))
}

/// The text of a value: as it is if it is one word, or was quoted by `Debug` already; quoted otherwise.
fn quote(value: &str) -> Cow<'_, str> {
    let parts = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '"' | '=');
    let is_word = !value.is_empty() && !value.contains(parts);
    match is_word || is_quoted(value) {
        true => Cow::Borrowed(value),
        false => Cow::Owned(format!("{value:?}")),
    }
}

/// Whether the value is one string as `Debug` writes it: quotes inside it are escaped, and it has no control
/// characters.
fn is_quoted(value: &str) -> bool {
    let inner = value.strip_prefix('"').and_then(|it| it.strip_suffix('"'));
    let mut escaped = false;
    let plain = inner.is_some_and(|inner| {
        inner.chars().all(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            !ends && !c.is_control()
        })
    });
    plain && !escaped
}

fn report_dropped(lines: u64) {
    tracing::warn!(
        lines,
        "log lines were dropped: the reader of standard error was too slow"
    );
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_one_word_or_one_quoted_string() {
        for (value, written) in [
            ("word", "word"),
            ("a/b:1,x'y", "a/b:1,x'y"),
            ("", "\"\""),
            ("two words", "\"two words\""),
            ("a=b", "\"a=b\""),
            ("a\nWARN b", r#""a\nWARN b""#),
            ("a\tb\u{1b}[0m", r#""a\tb\u{1b}[0m""#),
            // Not one string, although it begins and ends like one.
            (r#""a" and "b""#, r#""\"a\" and \"b\"""#),
            (r#"""#, r#""\"""#),
            (r#""a\""#, r#""\"a\\\"""#),
            ("\"a\nb\"", r#""\"a\nb\"""#),
        ] {
            assert_eq!(quote(value), written, "{value}");
        }
    }

    #[test]
    fn what_debug_has_quoted_stays() {
        for value in ["", "a b", "a\"b", "a\\", "a\nb", "\u{7f}"] {
            let value = format!("{value:?}");
            assert_eq!(quote(&value), value);
        }
    }
}
