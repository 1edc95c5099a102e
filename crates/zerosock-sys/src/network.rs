//! Network namespaces: a thread that is alone with its devices.

use std::io;

/// Moves the calling thread into a network namespace of its own, with a loopback device that is
/// down and nothing else. Sockets that it has stay where they are; those that it makes from now on,
/// and the programs that it starts, are there. The namespace ends with the last of them.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN; ENOSPC where no more are allowed.
pub fn isolate_thread() -> io::Result<()> {
    // SAFETY: only the calling thread's later sockets are concerned; no memory is touched.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
