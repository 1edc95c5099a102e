//! Sockets that share an address (SO_REUSEPORT).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::socket_option::check;

/// Has the kernel deliver to the first socket of a group what it would spread over all of them.
///
/// A connected UDP socket of the group gets the datagrams of its peer nevertheless, and one that is bound
/// and not connected yet gets none of others: there is no time at which a new socket of the group receives
/// what was not meant for it.
///
/// # Errors
/// EINVAL if no second socket was ever bound to the address.
pub fn deliver_to_first(socket: impl AsFd) -> io::Result<()> {
    let mut code = [libc::sock_filter {
        // BPF_RET | BPF_K: return the number, 0, which is the index of the first.
        code: 0x06,
        jt: 0,
        jf: 0,
        k: 0,
    }];
    let program = libc::sock_fprog {
        len: 1,
        filter: code.as_mut_ptr(),
    };
    // SAFETY: the option's value is a `sock_fprog` of the given size; it names `len` instructions. Both
    // live until the call returns, and the kernel only reads them.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    check(result)
}

#[cfg(test)]
#[path = "reuseport_tests.rs"]
mod tests;
