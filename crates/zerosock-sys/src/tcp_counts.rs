//! The bytes that were written to a TCP socket, by this process or by the kernel's redirection.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::socket_option::{check, get};

/// SIOCOUTQ: bytes in the send queue, sent and not acknowledged ones included.
const SIOCOUTQ: libc::c_ulong = 0x5411;
/// Offset of `tcpi_bytes_acked` in `struct tcp_info`.
const BYTES_ACKED: usize = 120;

/// Number of bytes that have been put into the send queue of a connected TCP socket, by this process or
/// by the kernel. It starts at a small number (the handshake counts) and grows with each byte; the end
/// of the stream counts as one more. It is never too large; if acknowledgements arrive all the time,
/// the bytes of the last ones may be missing.
///
/// # Errors
/// EOPNOTSUPP or ENOPROTOOPT for a socket that is not TCP. `Unsupported` before Linux 4.1.
pub fn tcp_written(socket: impl AsFd) -> io::Result<u64> {
    /// Acknowledgements during the two calls are rare: one attempt is mostly enough.
    const ATTEMPTS: u32 = 4;
    let mut acknowledged = bytes_acked(&socket)?;
    let mut written = 0;
    for _ in 0..ATTEMPTS {
        // The queue shrinks by what is added to the acknowledged bytes, so these are read first.
        written = acknowledged + queued(&socket)?;
        let now = bytes_acked(&socket)?;
        if now == acknowledged {
            break;
        }
        acknowledged = now;
    }
    Ok(written)
}

fn queued(socket: &impl AsFd) -> io::Result<u64> {
    let mut queued: c_int = 0;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the request writes one `int` to the address.
    check(unsafe { libc::ioctl(socket, SIOCOUTQ as _, &raw mut queued) })?;
    Ok(queued.unsigned_abs().into())
}

fn bytes_acked(socket: &impl AsFd) -> io::Result<u64> {
    let mut info = [0u8; 256];
    let len = get(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
    let field = info[..len].get(BYTES_ACKED..).and_then(<[u8]>::first_chunk);
    field
        .map(|bytes| u64::from_ne_bytes(*bytes))
        .ok_or_else(|| io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};

    #[test]
    fn counts_what_was_written_read_or_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut other = listener.accept().unwrap().0;
        let start = tcp_written(&one).unwrap();
        one.write_all(&[1; 1000]).unwrap();
        assert_eq!(tcp_written(&one).unwrap() - start, 1000);
        other.read_exact(&mut [0; 1000]).unwrap();
        one.write_all(&[1; 5]).unwrap();
        other.write_all(&[1; 7]).unwrap();
        one.read_exact(&mut [0; 7]).unwrap();
        assert_eq!(tcp_written(&one).unwrap() - start, 1005);
        one.shutdown(Shutdown::Write).unwrap();
        assert_eq!(tcp_written(&one).unwrap() - start, 1006);
    }

    #[test]
    fn other_sockets_have_no_count() {
        tcp_written(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap_err();
    }
}
