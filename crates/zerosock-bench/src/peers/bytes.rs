//! Kernel byte streams: Unix sockets, TCP and pipes.
//!
//! Each message is one write. The reader reads as much as is available and checks messages in its
//! buffer: one read for each small message would make the peer look worse than it is.

use std::io::{ErrorKind, Read, Write};

use crate::worker::Link;
use crate::worker::touch::{Check, Fault, Message, Seen};

/// Smallest size of the reader's buffer, bytes.
const READ_AHEAD: usize = 64 << 10;

/// A connection of bytes.
pub(crate) struct Bytes<R, W> {
    input: R,
    output: W,
    message: Vec<u8>,
    /// Its length is a multiple of the message length, so that no message wraps around.
    buffer: Vec<u8>,
    filled: usize,
    taken: usize,
}

impl<R: Read, W: Write> Bytes<R, W> {
    pub(crate) fn new(input: R, output: W, size: usize) -> Bytes<R, W> {
        Bytes {
            input,
            output,
            message: vec![0; size],
            buffer: vec![0; (READ_AHEAD / size).max(1) * size],
            filled: 0,
            taken: 0,
        }
    }
}

impl<R: Read, W: Write> Link for Bytes<R, W> {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        let bytes = &mut self.message[..message.len];
        message.write(bytes);
        self.output
            .write_all(bytes)
            .map_err(|error| format!("write: {error}"))
    }

    fn recv(&mut self, mut check: Check) -> Result<Seen, Fault> {
        if self.taken == self.buffer.len() {
            (self.taken, self.filled) = (0, 0);
        }
        let end = self.taken + check.missing();
        while self.filled < end {
            match self.input.read(&mut self.buffer[self.filled..]) {
                Ok(0) => return Err("the other side is gone".to_owned()),
                Ok(got) => self.filled += got,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("read: {error}")),
            }
        }
        check.part(&self.buffer[self.taken..end]);
        self.taken = end;
        check.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns its bytes in pieces of seven.
    struct Pieces<'b>(&'b [u8]);

    impl Read for Pieces<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let len = out.len().min(7);
            self.0.read(&mut out[..len])
        }
    }

    #[test]
    fn messages_are_found_however_the_stream_is_cut() {
        let mut sent = Vec::new();
        let mut link = Bytes::new(std::io::empty(), &mut sent, 40);
        for number in 0..5000 {
            let message = Message {
                number,
                len: 40,
                last: number == 4999,
            };
            link.send(message).unwrap();
        }
        let mut link = Bytes::new(Pieces(&sent), std::io::sink(), 40);
        for number in 0..4999 {
            assert_eq!(link.recv(Check::new(number, 40)), Ok(Seen::Next));
        }
        assert_eq!(link.recv(Check::new(4999, 40)), Ok(Seen::Last));
        assert!(link.recv(Check::new(5000, 40)).is_err(), "nothing is left");
    }
}
