//! A bounded queue of log lines, and the thread that writes them.
//!
//! Guests and clients cause log lines, and standard error may be a pipe whose reader has stopped. A worker
//! that wrote them itself would stop with the reader.
//!
//! # Invariants
//! - Logging a line never waits: beyond [`CAPACITY`] lines it is dropped and counted.
//! - The number of dropped lines is logged once the queue is empty again.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use zerosock_sys::sandbox::{self, CapabilitySet};

/// Lines that wait to be written, at most.
const CAPACITY: usize = 8192;

/// The longest time that [`Queue::flush`] waits.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Pause of [`Queue::flush`] while the queue is full.
const FLUSH_PAUSE: Duration = Duration::from_millis(5);

#[derive(Debug)]
enum Entry {
    Line(Vec<u8>),
    /// Answer when all lines before are written.
    Flush(SyncSender<()>),
}

/// Where log lines go. Each write is one line.
#[derive(Clone, Debug)]
pub(super) struct Queue {
    sender: SyncSender<Entry>,
    /// Lines dropped since the last report.
    dropped: Arc<AtomicU64>,
}

impl Queue {
    /// Starts the thread that writes to `output`; `report` logs how many lines were dropped.
    ///
    /// # Errors
    /// No thread can be created.
    pub(super) fn start(output: File, report: fn(u64)) -> io::Result<Queue> {
        let (sender, receiver) = sync_channel(CAPACITY);
        let dropped = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&dropped);
        let (dropping, has_dropped) = sync_channel::<()>(0);
        thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || {
                // The thread writes to an open descriptor, which needs no capability. It exists before
                // the command has dropped those that it needs at its start only. An error means that
                // there are none to drop.
                let _ = sandbox::drop_capabilities(CapabilitySet::empty());
                drop(dropping);
                write_lines(&receiver, output, &counted, report);
            })?;
        // A filter may refuse the drop later.
        let _ = has_dropped.recv();
        Ok(Queue { sender, dropped })
    }

    /// Waits until all lines are written, or for [`FLUSH_LIMIT`].
    pub(super) fn flush(&self) {
        let deadline = Instant::now() + FLUSH_LIMIT;
        let (done, written) = sync_channel(1);
        let mut entry = Entry::Flush(done);
        loop {
            match self.sender.try_send(entry) {
                Ok(()) => break,
                Err(TrySendError::Full(back)) if Instant::now() < deadline => entry = back,
                Err(_) => return,
            }
            thread::sleep(FLUSH_PAUSE);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        // A reader that has stopped loses the lines.
        let _ = written.recv_timeout(left);
    }
}

impl Write for Queue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.sender.try_send(Entry::Line(line.to_vec())).is_err() {
            // Relaxed: a number without relation to other memory.
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_lines(receiver: &Receiver<Entry>, mut output: File, dropped: &AtomicU64, report: fn(u64)) {
    loop {
        let entry = match receiver.try_recv() {
            Ok(entry) => Some(entry),
            Err(none) => {
                let lines = dropped.swap(0, Ordering::Relaxed);
                if lines > 0 {
                    report(lines);
                }
                match none {
                    TryRecvError::Empty => receiver.recv().ok(),
                    TryRecvError::Disconnected => None,
                }
            }
        };
        match entry {
            // There is no place to report an error of the log.
            Some(Entry::Line(line)) => drop(output.write_all(&line)),
            Some(Entry::Flush(done)) => drop(done.try_send(())),
            None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    static REPORTED: AtomicU64 = AtomicU64::new(0);

    #[test]
    fn a_reader_that_stops_costs_lines_and_no_time() {
        let (reader, writer) = std::io::pipe().unwrap();
        let output = File::from(std::os::fd::OwnedFd::from(writer));
        let report = |lines| {
            REPORTED.fetch_add(lines, Ordering::Relaxed);
        };
        let mut queue = Queue::start(output, report).unwrap();
        // More than the queue and the pipe take.
        let line = [b"x".repeat(99), b"\n".to_vec()].concat();
        let all = 2 * CAPACITY as u64;
        for _ in 0..all {
            queue.write_all(&line).unwrap();
        }
        assert!(queue.dropped.load(Ordering::Relaxed) > 0);
        // Bounded, with a reader that does not read.
        queue.flush();

        let reading = thread::spawn(move || BufReader::new(reader).lines().count() as u64);
        queue.flush();
        // The thread ends with the last handle, and closes the pipe.
        drop(queue);
        let read = reading.join().unwrap();
        assert_eq!(read + REPORTED.load(Ordering::Relaxed), all);
    }
}
