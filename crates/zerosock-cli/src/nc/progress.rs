//! A progress line on standard error for long transfers.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rustix::stdio;

/// Bytes transferred so far.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
}

/// No line before this time: short transfers end sooner.
const QUIET_AT_FIRST: Duration = Duration::from_millis(700);

/// A progress line; shown only if standard error is a terminal and the counted stream is not.
pub(crate) struct Progress {
    started: Instant,
    count_sent: bool,
    count_received: bool,
    /// Remaining bytes of standard input, when it is a file.
    total: Option<u64>,
    bar: Option<ProgressBar>,
    wanted: bool,
}

impl Progress {
    /// `wanted`: whether the user allows the line; it is shown only if there is something to count.
    pub(crate) fn new(wanted: bool, read_stdin: bool) -> Progress {
        let count_sent = read_stdin && !std::io::stdin().is_terminal();
        let count_received = !std::io::stdout().is_terminal();
        Progress {
            started: Instant::now(),
            count_sent,
            count_received,
            total: if count_sent { bytes_of_stdin() } else { None },
            bar: None,
            wanted: wanted && (count_sent || count_received) && std::io::stderr().is_terminal(),
        }
    }

    /// Updates the line.
    pub(crate) fn show(&mut self, moved: &Moved) {
        if !self.wanted || self.started.elapsed() < QUIET_AT_FIRST {
            return;
        }
        let sent = moved.sent.load(Ordering::Relaxed);
        let received = moved.received.load(Ordering::Relaxed);
        if received > 0 && !self.count_received {
            // The terminal now shows received bytes: print no line between them.
            self.clear();
            self.wanted = false;
            return;
        }
        let mut bytes = if self.count_sent { sent } else { 0 };
        if self.count_received {
            bytes += received;
        }
        // Only the total of sent bytes is known.
        let total = self.total.filter(|_| received == 0);
        let bar = self.bar.get_or_insert_with(ProgressBar::no_length);
        match total {
            Some(total) if bar.length() != Some(total) => {
                bar.set_length(total);
                bar.set_style(style(
                    "{bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta} left",
                ));
            }
            None if bar.length().is_some() || bar.position() == 0 => {
                bar.unset_length();
                bar.set_style(style("{spinner} {bytes} {binary_bytes_per_sec} {elapsed}"));
            }
            _ => {}
        }
        bar.set_position(bytes);
    }

    /// Removes the line.
    pub(crate) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Remaining bytes of standard input, if it is a file.
fn bytes_of_stdin() -> Option<u64> {
    let stat = rustix::fs::fstat(stdio::stdin()).ok()?;
    if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
        return None;
    }
    let position = rustix::fs::tell(stdio::stdin()).ok()?;
    u64::try_from(stat.st_size).ok()?.checked_sub(position)
}
