//! Names the calls that a filter would refuse, in the place of refusing them.

use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;
use std::{io, ptr, thread};

use super::calls::name_of;
use super::filter::{CallPolicy, watch_calls};
use crate::LogLimit;

/// SECCOMP_IOCTL_NOTIF_RECV, an `_IOWR('!', 0, struct seccomp_notif)`.
const RECEIVE: libc::Ioctl = 0xc050_2100_u32 as libc::Ioctl;
/// SECCOMP_IOCTL_NOTIF_SEND, an `_IOWR('!', 1, struct seccomp_notif_resp)`.
const ANSWER: libc::Ioctl = 0xc018_2101_u32 as libc::Ioctl;
const _: () = assert!(size_of::<libc::seccomp_notif>() == 0x50);
const _: () = assert!(size_of::<libc::seccomp_notif_resp>() == 0x18);

/// Lets all threads make all calls, and a new thread name those that [`filter_calls`](super::filter_calls) would
/// refuse: `report` gets a text, at a bounded rate.
///
/// # Errors
/// Errors of seccomp(2); no thread can be created.
pub fn log_refused_calls(
    policy: &CallPolicy,
    report: impl Fn(&str) + Send + 'static,
) -> io::Result<()> {
    let (give, take) = std::sync::mpsc::sync_channel::<OwnedFd>(1);
    // Before the filter: the thread answers for itself only calls that need no answer.
    let watch = move || {
        if let Ok(listener) = take.recv() {
            answer_all(&listener, report);
        }
    };
    thread::Builder::new().name("sandbox".into()).spawn(watch)?;
    let listener = watch_calls(policy)?;
    give.send(listener).map_err(io::Error::other)
}

fn answer_all(listener: &OwnedFd, report: impl Fn(&str)) {
    let limit = LogLimit::default();
    loop {
        let mut call = MaybeUninit::<libc::seccomp_notif>::zeroed();
        // SAFETY: the kernel wants a structure of zeroes of this size, and fills it.
        let received = unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, call.as_mut_ptr()) };
        if received < 0 {
            match io::Error::last_os_error().raw_os_error() {
                // The calling thread has ended meanwhile.
                Some(libc::EINTR | libc::ENOENT) => continue,
                _ => return,
            }
        }
        // SAFETY: it consists of integers, and has been initialised.
        let call = unsafe { call.assume_init() };
        let mut answer = libc::seccomp_notif_resp {
            id: call.id,
            val: 0,
            error: 0,
            flags: libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
        };
        // SAFETY: the kernel reads a structure of this size. Fails if the calling thread has ended.
        unsafe { libc::ioctl(listener.as_raw_fd(), ANSWER, ptr::from_mut(&mut answer)) };
        if let Some(suppressed) = limit.admit(Instant::now()) {
            let number = i64::from(call.data.nr);
            let name = name_of(number).unwrap_or("a call without a name here");
            let [first, second, third, ..] = call.data.args;
            let more = match suppressed {
                None => String::new(),
                Some(count) => format!("; {count} more since the last line"),
            };
            report(&format!(
                "system call {name} (number {number}) with {first:#x}, {second:#x}, {third:#x}{more}"
            ));
        }
    }
}
