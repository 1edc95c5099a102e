//! The system calls that fail, and how.

use crate::injector::Effect;
use libc::*;

/// Errors that may come at any time, for which the caller is not to blame.
type Call = (i64, &'static str, &'static [i32], bool);

/// Number, name, errors, and whether a call may also transfer less than asked for. EAGAIN is left out where the kernel would
/// tell of the change by an event: a made-up one has none.
pub(crate) const CALLS: &[Call] = &[
    (SYS_read, "read", &[EINTR], true),
    (SYS_write, "write", &[EINTR, ENOSPC], true),
    (SYS_readv, "readv", &[EINTR], true),
    (SYS_writev, "writev", &[EINTR, ENOSPC], true),
    (SYS_recvfrom, "recvfrom", &[EINTR, ENOMEM], true),
    (SYS_sendto, "sendto", &[EINTR, ENOMEM, ENOBUFS], true),
    (SYS_recvmsg, "recvmsg", &[EINTR, ENOMEM, EMFILE], true),
    (
        SYS_sendmsg,
        "sendmsg",
        &[EINTR, ENOMEM, ENOBUFS, ETOOMANYREFS],
        true,
    ),
    (SYS_openat, "openat", &[EMFILE, ENFILE, ENOMEM], false),
    (
        SYS_openat2,
        "openat2",
        &[EMFILE, ENFILE, ENOMEM, EAGAIN],
        false,
    ),
    (SYS_statx, "statx", &[ENOMEM], false),
    (SYS_socket, "socket", &[EMFILE, ENFILE, ENOMEM], false),
    (
        SYS_socketpair,
        "socketpair",
        &[EMFILE, ENFILE, ENOMEM],
        false,
    ),
    (
        SYS_accept4,
        "accept4",
        &[EMFILE, ENFILE, ENOMEM, ECONNABORTED, EINTR],
        false,
    ),
    (SYS_connect, "connect", &[ENOMEM, EAGAIN, EINTR], false),
    (SYS_bind, "bind", &[ENOMEM, ENOSPC], false),
    (SYS_listen, "listen", &[ENOMEM], false),
    (SYS_setsockopt, "setsockopt", &[ENOMEM], false),
    (SYS_epoll_create1, "epoll_create1", &[EMFILE, ENOMEM], false),
    (SYS_epoll_ctl, "epoll_ctl", &[ENOMEM, ENOSPC], false),
    (SYS_epoll_pwait, "epoll_pwait", &[EINTR], false),
    (SYS_epoll_wait, "epoll_wait", &[EINTR], false),
    (SYS_poll, "poll", &[EINTR, ENOMEM], false),
    (SYS_ppoll, "ppoll", &[EINTR, ENOMEM], false),
    (SYS_eventfd2, "eventfd2", &[EMFILE, ENFILE, ENOMEM], false),
    (
        SYS_timerfd_create,
        "timerfd_create",
        &[EMFILE, ENOMEM],
        false,
    ),
    (
        SYS_memfd_create,
        "memfd_create",
        &[EMFILE, ENFILE, ENOMEM],
        false,
    ),
    (SYS_ftruncate, "ftruncate", &[EINTR, ENOSPC], false),
    (SYS_fallocate, "fallocate", &[EINTR, ENOSPC], false),
    (SYS_mmap, "mmap", &[ENOMEM, EAGAIN], false),
    (SYS_fcntl, "fcntl", &[EMFILE], false),
    (SYS_dup, "dup", &[EMFILE], false),
    (SYS_pidfd_open, "pidfd_open", &[EMFILE, ENOMEM], false),
    (
        SYS_io_uring_setup,
        "io_uring_setup",
        &[EMFILE, ENOMEM],
        false,
    ),
    (
        SYS_io_uring_enter,
        "io_uring_enter",
        &[EINTR, EAGAIN, EBUSY],
        false,
    ),
    (SYS_io_uring_register, "io_uring_register", &[ENOMEM], false),
    (SYS_io_setup, "io_setup", &[EAGAIN, ENOMEM], false),
    (SYS_io_submit, "io_submit", &[EAGAIN], false),
    (SYS_clone3, "clone3", &[EAGAIN, ENOMEM], false),
    (SYS_execve, "execve", &[ENOMEM, EACCES], false),
    (SYS_unlink, "unlink", &[ENOMEM, EROFS], false),
];

pub(crate) fn name(call: i64) -> &'static str {
    CALLS.iter().find(|it| it.0 == call).map_or("?", |it| it.1)
}

/// What a call may do, with the number of times in a row.
pub(crate) fn effects(call: i64) -> Vec<(Effect, u32)> {
    let mut effects = Vec::new();
    for &(_, _, errors, short) in CALLS.iter().filter(|it| it.0 == call) {
        for &error in errors {
            effects.push((Effect::Error(error), 1));
            if [EMFILE, ENOMEM, ENOSPC].contains(&error) {
                effects.push((Effect::Error(error), 8));
            }
        }
        if short {
            effects.extend([(Effect::Short, 1), (Effect::Short, 8)]);
        }
    }
    effects
}
