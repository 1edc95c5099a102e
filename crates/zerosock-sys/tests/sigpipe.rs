//! Alone in its process, because it changes the disposition of SIGPIPE.

use std::io::Read;
use std::os::unix::net::UnixStream;

use zerosock_sys::notify::{CallFd, CallThread, Notifier, ThreadCount};

#[test]
fn a_call_pipe_or_socket_without_a_reader_raises_no_sigpipe_in_the_process() {
    // SAFETY: no thread of this process relies on another disposition. The default, which a program
    // has that is not written in Rust, ends the process.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let thread = CallThread::new(&ThreadCount::default());
    let call = |fd: std::os::fd::OwnedFd| CallFd::new(fd.into(), thread.clone()).unwrap();
    let notifier = Notifier::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    notifier.notify(&call(writer.into()));
    let (reader, writer) = UnixStream::pair().unwrap();
    drop(reader);
    notifier.notify(&call(writer.into()));
    // The thread makes its writes in order: this is the last one.
    let (mut reader, writer) = std::io::pipe().unwrap();
    notifier.notify(&call(writer.into()));
    reader.read_exact(&mut [0; 8]).unwrap();
}
