//! The handshake of hybrid sockets: `CONNECT port` and `OK port`.

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::{Context, RelayDevice};
use crate::relay::pair::SocketStage;
use zerosock_virtio::poller::Readiness;

/// `OK `, ten digits and a newline, and some patience for other programs' blanks.
pub const LONGEST_ANSWER: usize = 64;

/// What the close of a hybrid socket in the place of an answer can mean: it carries no reason.
pub const CLOSED_WITHOUT_OK: &str = "no VMM is connected, no driver runs, the guest does not answer, no \
    listener, its backlog is full, or access is denied; `serve --log-level debug` logs which";

/// What a hybrid socket has answered.
#[derive(Debug, Eq, PartialEq)]
pub enum HybridAnswer {
    /// So many bytes are the answer; what follows is the guest's.
    Ok(usize),
    /// There is no whole line yet, nor [`LONGEST_ANSWER`].
    Unfinished,
    /// This is no answer to CONNECT.
    Other(String),
}

impl HybridAnswer {
    /// Reads the first bytes of a hybrid socket.
    pub fn read(answer: &[u8]) -> HybridAnswer {
        let Some(end) = answer.iter().position(|&byte| byte == b'\n') else {
            return match answer.len() < LONGEST_ANSWER {
                true => HybridAnswer::Unfinished,
                false => HybridAnswer::Other(String::from_utf8_lossy(answer).into_owned()),
            };
        };
        let line = String::from_utf8_lossy(&answer[..end]);
        match line.trim_end().strip_prefix("OK ").map(str::parse::<u32>) {
            Some(Ok(_)) => HybridAnswer::Ok(end + 1),
            _ => HybridAnswer::Other(line.into_owned()),
        }
    }
}

impl RelayDevice {
    /// Sends CONNECT to a hybrid socket that is connected.
    pub(super) fn greet(&mut self, key: u32, end: usize, cx: &mut Context<'_>) {
        let Some(pair) = self.pairs.get(key as usize) else {
            return;
        };
        let greeting = self.plan.destinations[end & 1].as_ref();
        let Some(line) = greeting.and_then(|to| to.greeting()) else {
            return;
        };
        // These few bytes always fit into an empty send buffer.
        if let Err(errno) = pair.side(end).socket.send(line.as_bytes()) {
            self.fail_connect(key, end, &errno, cx);
        }
    }

    /// Reads the answer, and no byte behind it.
    pub(super) fn read_greeting(
        &mut self,
        key: u32,
        end: usize,
        readiness: Readiness,
        cx: &mut Context<'_>,
    ) {
        let Some(pair) = self.pairs.get(key as usize) else {
            return;
        };
        let socket = &pair.side(end).socket;
        let mut answer = [0; LONGEST_ANSWER];
        let peeked = socket.fd().and_then(|fd| {
            rustix::net::recv(fd, &mut answer[..], RecvFlags::PEEK).map(|(got, _)| got)
        });
        let got = match peeked {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok(0) | Err(Errno::CONNRESET) => {
                let reason = format_args!("closed without OK ({CLOSED_WITHOUT_OK})");
                return self.fail_connect(key, end, &reason, cx);
            }
            Err(errno) => return self.fail_connect(key, end, &errno, cx),
            Ok(got) => got,
        };
        match HybridAnswer::read(&answer[..got]) {
            // The peek never returns 0 behind unread bytes.
            HybridAnswer::Unfinished if readiness.peer_finished() => {
                self.fail_connect(key, end, &"closed before its OK line was complete", cx);
            }
            HybridAnswer::Unfinished => {}
            HybridAnswer::Ok(length) => match socket.receive(&mut answer[..length]) {
                Ok(_) => self.advance(key, end, SocketStage::Connected, cx),
                Err(errno) => self.fail_connect(key, end, &errno, cx),
            },
            HybridAnswer::Other(line) => {
                let reason = format!("answered `{}` to CONNECT", line.escape_debug());
                self.fail_connect(key, end, &reason, cx);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(answer: &[u8]) -> HybridAnswer {
        HybridAnswer::read(answer)
    }

    #[test]
    fn an_answer_ends_with_its_newline() {
        assert_eq!(read(b""), HybridAnswer::Unfinished);
        assert_eq!(read(b"OK 12"), HybridAnswer::Unfinished);
        assert_eq!(read(b"OK 1234\nOK 5\n"), HybridAnswer::Ok(8));
        assert_eq!(read(b"OK 1234 \nx"), HybridAnswer::Ok(9));
        assert_eq!(read(b"OK x\n"), HybridAnswer::Other("OK x".into()));
        assert_eq!(read(b"\n"), HybridAnswer::Other(String::new()));
        assert!(matches!(read(&[b'O'; 64]), HybridAnswer::Other(_)));
    }
}
