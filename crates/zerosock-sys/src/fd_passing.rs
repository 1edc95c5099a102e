//! File descriptors over Unix sockets (SCM_RIGHTS, unix(7)).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most descriptors that one call sends or receives.
pub const MAX_FDS: usize = 32;

/// What [`recv`] got.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Received {
    /// Bytes written to the buffer; 0 at end of file.
    pub bytes: usize,
    /// Descriptors were lost: more came than [`MAX_FDS`], or than this process may open. The
    /// kernel has closed those.
    pub truncated_fds: bool,
}

/// Sends bytes with descriptors in one sendmsg(2). Does not block and raises no SIGPIPE. Returns
/// how many bytes went; the descriptors go with the first of them.
///
/// # Errors
/// `WouldBlock` when the socket takes nothing now, `InvalidInput` for more than [`MAX_FDS`], else
/// what sendmsg(2) answers.
pub fn send(fd: impl AsFd, data: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if fds.len() > MAX_FDS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "{} descriptors in one message, at most {MAX_FDS} go",
                fds.len()
            ),
        ));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        match sendmsg(&fd, data, &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Receives bytes and descriptors in one recvmsg(2). Does not block. Descriptors are closed on
/// exec. At end of file zero bytes come; an empty `buf` tells nothing of it.
///
/// # Errors
/// `WouldBlock` when nothing is there, else what recvmsg(2) answers.
pub fn recv(fd: impl AsFd, buf: &mut [u8], fds: &mut impl Extend<OwnedFd>) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = match recvmsg(&fd, &mut [IoSliceMut::new(buf)], &mut control, flags) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result?,
        };
        let mut truncated_fds = message.flags.contains(ReturnFlags::CTRUNC);
        let mut room = MAX_FDS;
        for message in control.drain() {
            // Other kinds come only to sockets that asked for them.
            if let RecvAncillaryMessage::ScmRights(mut rights) = message {
                fds.extend(rights.by_ref().take(room).inspect(|_| room -= 1));
                // The buffer is rounded up and may hold one more, which is closed here.
                truncated_fds |= rights.count() > 0;
            }
        }
        return Ok(Received {
            bytes: message.bytes,
            truncated_fds,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{fstat, memfd_create};
    use rustix::io::{FdFlags, fcntl_getfd};
    use std::os::unix::net::UnixStream;

    fn files(count: usize) -> Vec<OwnedFd> {
        (0..count)
            .map(|_| memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
            .collect()
    }

    #[test]
    fn descriptors_arrive_closed_on_exec() {
        let (a, b) = UnixStream::pair().unwrap();
        let sent = files(3);
        let borrowed: Vec<_> = sent.iter().map(|fd| fd.as_fd()).collect();
        let data = [IoSlice::new(b"he"), IoSlice::new(b"llo")];
        assert_eq!(send(&a, &data, &borrowed).unwrap(), 5);

        let mut buf = [0; 16];
        let mut got = Vec::new();
        let received = recv(&b, &mut buf, &mut got).unwrap();
        assert_eq!(
            received,
            Received {
                bytes: 5,
                truncated_fds: false
            }
        );
        assert_eq!(&buf[..5], b"hello");
        assert_eq!(got.len(), 3);
        for (sent, got) in sent.iter().zip(&got) {
            assert_eq!(fstat(sent).unwrap().st_ino, fstat(got).unwrap().st_ino);
            assert!(fcntl_getfd(got).unwrap().contains(FdFlags::CLOEXEC));
        }
    }

    #[test]
    fn descriptors_beyond_the_room_are_reported() {
        let (a, b) = UnixStream::pair().unwrap();
        let sent = files(MAX_FDS + 1);
        let borrowed: Vec<_> = sent.iter().map(|fd| fd.as_fd()).collect();
        let error = send(&a, &[IoSlice::new(b"x")], &borrowed).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);

        // A peer that has no such limit.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        sendmsg(&a, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();

        let mut got = Vec::new();
        let received = recv(&b, &mut [0; 4], &mut got).unwrap();
        assert_eq!(
            received,
            Received {
                bytes: 1,
                truncated_fds: true
            }
        );
        assert_eq!(got.len(), MAX_FDS);
    }

    #[test]
    fn never_blocks_and_sees_the_end() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut got = Vec::new();
        let error = recv(&b, &mut [0; 4], &mut got).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let block = [0; 65536];
        let error = loop {
            if let Err(error) = send(&a, &[IoSlice::new(&block)], &[]) {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(b);
        let error = send(&a, &[IoSlice::new(&block)], &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);

        let (a, b) = UnixStream::pair().unwrap();
        drop(a);
        let received = recv(&b, &mut [0; 4], &mut got).unwrap();
        assert_eq!(
            received,
            Received {
                bytes: 0,
                truncated_fds: false
            }
        );
        assert!(got.is_empty());
    }
}
