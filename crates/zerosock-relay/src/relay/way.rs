//! How the bytes of a pair of sockets are moved, and which way is taken for which sockets.

use std::fmt;
use std::str::FromStr;

use super::socket::SocketKind;

/// How the bytes of a pair are moved.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Way {
    /// By what is measured for the kinds of sockets: splice into Unix stream sockets, copies into TCP
    /// and vsock, batches of messages for datagrams.
    #[default]
    Auto,
    /// Through a pipe, so that the kernel passes pages on instead of copying them.
    Splice,
    /// Through a buffer of the worker.
    Copy,
    /// By redirection inside of the kernel (BPF).
    Sockmap,
}

/// Why a text names no way.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("give one of auto, splice, copy and sockmap")]
pub struct UnknownWay;

impl FromStr for Way {
    type Err = UnknownWay;

    fn from_str(text: &str) -> Result<Way, UnknownWay> {
        match text {
            "auto" => Ok(Way::Auto),
            "splice" => Ok(Way::Splice),
            "copy" => Ok(Way::Copy),
            "sockmap" => Ok(Way::Sockmap),
            _ => Err(UnknownWay),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::Auto => "auto",
            Way::Splice => "splice",
            Way::Copy => "copy",
            Way::Sockmap => "sockmap",
        })
    }
}

/// How one direction of a pair moves its bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Mode {
    /// A stream, from the source into a pipe and from the pipe into the target.
    Splice,
    /// A stream, through the worker's buffer.
    Copy,
    /// A stream: large pieces as in `Splice`, small ones, for which a pipe costs more than a copy, as in
    /// `Copy`.
    Adaptive,
    /// Messages, each of them whole.
    Messages,
}

impl Way {
    /// The mode of the direction from one socket to another.
    ///
    /// A Unix socket takes the pages of a pipe as they are; TCP on the loopback interface, and through
    /// most network devices, is as fast from a buffer as from pages, for fewer system calls.
    pub(super) fn mode(self, from: SocketKind, to: SocketKind) -> Mode {
        if from.keeps_messages() || to.keeps_messages() {
            return Mode::Messages;
        }
        let can_splice = from.can_splice() && to.can_splice();
        match self {
            Way::Copy => Mode::Copy,
            Way::Splice if can_splice => Mode::Splice,
            Way::Auto | Way::Sockmap if can_splice && to == SocketKind::Unix => Mode::Adaptive,
            _ => Mode::Copy,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_read_and_shown_the_same() {
        for way in [Way::Auto, Way::Splice, Way::Copy, Way::Sockmap] {
            assert_eq!(way.to_string().parse(), Ok(way));
        }
        assert_eq!("fast".parse::<Way>(), Err(UnknownWay));
    }

    #[test]
    fn auto_splices_into_unix_sockets_only() {
        use SocketKind::{Tcp, Unix, UnixPackets, Vsock};
        for (from, to, wanted) in [
            (Tcp, Unix, Mode::Adaptive),
            (Unix, Unix, Mode::Adaptive),
            (Unix, Tcp, Mode::Copy),
            (Tcp, Tcp, Mode::Copy),
            (Vsock, Unix, Mode::Copy),
            (UnixPackets, UnixPackets, Mode::Messages),
        ] {
            assert_eq!(Way::Auto.mode(from, to), wanted, "{from:?} to {to:?}");
        }
        assert_eq!(Way::Splice.mode(Unix, Tcp), Mode::Splice);
        assert_eq!(Way::Splice.mode(Tcp, Unix), Mode::Splice);
        assert_eq!(Way::Splice.mode(Vsock, Tcp), Mode::Copy);
        assert_eq!(Way::Copy.mode(Unix, Unix), Mode::Copy);
    }
}
