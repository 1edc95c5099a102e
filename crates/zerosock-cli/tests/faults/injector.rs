//! Makes system calls of a process and its children fail, by seccomp user notification: a thread installs the filter and
//! starts the process, which inherits it; another one answers the notifications.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::net::{RecvFlags, SendFlags, SocketType, recv, send, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::calls::CALLS;
use crate::process::Running;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Error(i32),
    /// One byte is transferred.
    Short,
}

/// The call with this number, and `times - 1` later ones of its kind, have the effect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) call: i64,
    pub(crate) effect: Effect,
    pub(crate) number: u32,
    pub(crate) times: u32,
}

#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) counting: bool,
    pub(crate) fault: Option<Fault>,
    pub(crate) seen: BTreeMap<i64, u32>,
    /// Processes in which the fault happened.
    pub(crate) hit: Vec<u32>,
}

/// Starts the command under the filter.
pub(crate) fn start(mut command: Command, plan: Arc<Mutex<Plan>>) -> Running {
    let binary = PathBuf::from(command.get_program()).canonicalize().unwrap();
    let (listener, listeners) = mpsc::channel();
    let started = thread::spawn(move || {
        // Not all of it is known here: the channel's own calls must not need an answer.
        listener.send(install()).unwrap();
        Running::start(&mut command)
    });
    let listener = listeners.recv().unwrap();
    thread::spawn(move || answer(&listener, &binary, &plan));
    started.join().unwrap()
}

/// Installs the filter on this thread. Returns its listener.
fn install() -> OwnedFd {
    let statement = |code: u32, k| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for (at, call) in CALLS.iter().enumerate() {
        let mut jump = statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call.0 as u32);
        jump.jt = (CALLS.len() - at) as u8;
        filter.push(jump);
    }
    let end = libc::BPF_RET | libc::BPF_K;
    filter.push(statement(end, libc::SECCOMP_RET_ALLOW));
    filter.push(statement(end, libc::SECCOMP_RET_USER_NOTIF));
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the flag has no pointers.
    let set = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(set, 0);
    // SAFETY: `program` points to `filter`, and both live until the call returns.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &program,
        )
    };
    assert!(listener >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the call has just returned this descriptor, which nothing else owns.
    unsafe { OwnedFd::from_raw_fd(listener as RawFd) }
}

const RECEIVE: libc::c_ulong = 0xc050_2100;
const SEND: libc::c_ulong = 0xc018_2101;

/// Answers until the last process under the filter has ended.
fn answer(listener: &OwnedFd, binary: &PathBuf, plan: &Mutex<Plan>) {
    loop {
        let mut ready = [PollFd::new(listener, PollFlags::IN)];
        if poll(&mut ready, None).is_err() || !ready[0].revents().contains(PollFlags::IN) {
            return;
        }
        // SAFETY: all-zero is a value of this plain C structure, and the one that the kernel asks for.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the request number has the size of `call`, which the kernel fills.
        if unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &mut call) } < 0 {
            // A signal has ended the call meanwhile.
            continue;
        }
        let mut response = libc::seccomp_notif_resp {
            id: call.id,
            val: 0,
            error: 0,
            flags: 0,
        };
        match decide(&call, binary, &mut plan.lock().unwrap()) {
            Some(Effect::Error(error)) => response.error = -error,
            Some(Effect::Short) => response.val = 1,
            None => response.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
        }
        // SAFETY: the request number has the size of `response`, which the kernel reads. Fails if a signal has ended
        // the call.
        unsafe { libc::ioctl(listener.as_raw_fd(), SEND, &response) };
    }
}

fn decide(call: &libc::seccomp_notif, binary: &PathBuf, plan: &mut Plan) -> Option<Effect> {
    let (number, args) = (i64::from(call.data.nr), &call.data.args);
    if !plan.counting {
        return None;
    }
    let fails_alone = match number {
        // Without descriptor it is the allocator, which has no memory then and aborts.
        libc::SYS_mmap => args[3] & libc::MAP_ANONYMOUS as u64 == 0,
        // An eventfd that does not wait has no such errors, and nothing would repeat a wake-up.
        libc::SYS_read | libc::SYS_write => {
            let file = std::fs::read_link(format!("/proc/{}/fd/{}", call.pid, args[0]));
            file.is_ok_and(|file| !file.to_string_lossy().starts_with("anon_inode:"))
        }
        libc::SYS_fcntl => args[1] == libc::F_DUPFD_CLOEXEC as u64,
        _ => true,
    };
    if !fails_alone {
        return None;
    }
    let executable = std::fs::read_link(format!("/proc/{}/exe", call.pid)).ok()?;
    if executable != *binary {
        return None;
    }
    let seen = plan.seen.entry(number).or_default();
    *seen += 1;
    let fault = plan.fault.filter(|fault| {
        fault.call == number && (fault.number..fault.number + fault.times).contains(seen)
    })?;
    if fault.effect == Effect::Short {
        transfer_one_byte(call)?;
    }
    plan.hit.push(process(call.pid)?);
    Some(fault.effect)
}

fn process(thread: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    line.trim().parse().ok()
}

/// Makes a transfer of one byte in the place of the call. `None` if the call would not transfer bytes of a stream now, or
/// passes descriptors.
fn transfer_one_byte(call: &libc::seccomp_notif) -> Option<()> {
    let args = &call.data.args;
    let path = format!("/proc/{}/mem", call.pid);
    let memory = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .ok()?;
    let number = |at: u64| {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, at).ok()?;
        Some(u64::from_ne_bytes(bytes))
    };
    let first = |vector: u64, count: u64| {
        (0..count.min(16)).find_map(|at| {
            let length = number(vector + at * 16 + 8)?;
            (length > 1).then(|| number(vector + at * 16)).flatten()
        })
    };
    let message = args[1];
    let (reads, buffer) = match i64::from(call.data.nr) {
        it @ (libc::SYS_read | libc::SYS_recvfrom | libc::SYS_write | libc::SYS_sendto) => {
            let buffer = (args[2] > 1).then_some(args[1])?;
            (it == libc::SYS_read || it == libc::SYS_recvfrom, buffer)
        }
        libc::SYS_readv => (true, first(args[1], args[2])?),
        libc::SYS_writev => (false, first(args[1], args[2])?),
        it @ (libc::SYS_recvmsg | libc::SYS_sendmsg) => {
            let buffer = first(number(message + 16)?, number(message + 24)?)?;
            if it == libc::SYS_sendmsg && number(message + 40)? > 0 {
                return None;
            }
            (it == libc::SYS_recvmsg, buffer)
        }
        _ => return None,
    };
    let pid = Pid::from_raw(process(call.pid)? as i32)?;
    let target = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    let fd = pidfd_getfd(target.as_fd(), args[0] as RawFd, PidfdGetfdFlags::empty()).ok()?;
    let is_socket = FileType::from_raw_mode(fstat(&fd).ok()?.st_mode) == FileType::Socket;
    if !is_socket || sockopt::socket_type(&fd).ok()? != SocketType::STREAM {
        return None;
    }
    let wanted = if reads { PollFlags::IN } else { PollFlags::OUT };
    let mut ready = [PollFd::new(&fd, wanted)];
    poll(&mut ready, Some(&Timespec::default())).ok()?;
    if !ready[0].revents().contains(wanted) {
        return None;
    }
    let mut byte = [0];
    if !reads {
        memory.read_exact_at(&mut byte, buffer).ok()?;
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        return (send(&fd, &byte, flags).ok()? == 1).then_some(());
    }
    if i64::from(call.data.nr) == libc::SYS_recvmsg {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let into = &mut [std::io::IoSliceMut::new(&mut byte)];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        rustix::net::recvmsg(&fd, into, &mut ancillary, flags).ok()?;
        if ancillary.drain().next().is_some() {
            return None;
        }
        memory
            .write_all_at(&0u64.to_ne_bytes(), message + 40)
            .ok()?;
        memory
            .write_all_at(&0u32.to_ne_bytes(), message + 48)
            .ok()?;
    }
    let flags = match i64::from(call.data.nr) {
        libc::SYS_recvfrom => RecvFlags::from_bits_retain(args[3] as u32),
        libc::SYS_recvmsg => RecvFlags::from_bits_retain(args[2] as u32),
        _ => RecvFlags::empty(),
    };
    let flags = flags & RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (received, _) = recv(&fd, &mut byte, flags).ok()?;
    if received != 1 {
        return None;
    }
    memory.write_all_at(&byte, buffer).ok()
}
