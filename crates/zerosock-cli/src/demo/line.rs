//! The host's end of the guest's serial line, on which the demo's program reports that it runs.

use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::guest::BOOTED;
use crate::vm::qemu::Control;

/// Reads until the line that begins with [`BOOTED`].
pub(crate) struct Line {
    from: UnixStream,
    /// The current, incomplete line.
    text: Vec<u8>,
    ended: bool,
}

impl Control for Line {
    fn new(line: UnixStream) -> io::Result<Line> {
        Ok(Line {
            from: line,
            text: Vec::new(),
            ended: false,
        })
    }

    fn wait_for_boot(&mut self, timeout: Duration) -> Option<String> {
        let deadline = Instant::now() + timeout;
        let mut buffer = [0; 256];
        while !self.ended {
            let left = deadline.checked_duration_since(Instant::now())?;
            // A timeout of zero would be an error.
            let left = left.max(Duration::from_millis(1));
            self.from.set_read_timeout(Some(left)).ok()?;
            match self.from.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(count) => {
                    let release = buffer[..count].iter().find_map(|byte| self.push(*byte));
                    if release.is_some() {
                        return release;
                    }
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(_) => self.ended = true,
            }
        }
        None
    }

    fn is_gone(&self) -> bool {
        self.ended
    }
}

impl Line {
    /// The release, when `byte` completes its line.
    fn push(&mut self, byte: u8) -> Option<String> {
        if byte != b'\n' {
            self.text.push(byte);
            return None;
        }
        let line = std::mem::take(&mut self.text);
        let line = String::from_utf8_lossy(&line);
        line.strip_prefix(BOOTED)
            .map(|release| release.trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn the_release_is_found_behind_what_firmware_wrote_and_however_it_is_cut() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        let mut line = Line::new(host).unwrap();
        guest
            .write_all(b"\x1bcSeaBIOS \xff\n\nzerosock de")
            .unwrap();
        assert_eq!(line.wait_for_boot(Duration::from_millis(1)), None);
        assert!(!line.is_gone());
        guest.write_all(b"mo-guest: 6.1.0-x\r\nmore").unwrap();
        assert_eq!(line.wait_for_boot(LONG).as_deref(), Some("6.1.0-x"));
    }

    #[test]
    fn a_closed_serial_line_is_reported_at_once() {
        let (guest, host) = UnixStream::pair().unwrap();
        let mut line = Line::new(host).unwrap();
        drop(guest);
        assert_eq!(line.wait_for_boot(LONG), None);
        assert!(line.is_gone());
    }
}
