//! The filter of system calls, by seccomp(2).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use rustix::net::AddressFamily;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

use super::calls::{Calls, FATAL, FATAL_SUPERVISED, PERMITTED, PERMITTED_OLD};

/// What a process needs beyond files and Unix sockets.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct CallPolicy {
    /// Address families of the sockets that it makes, beside AF_UNIX.
    pub families: Vec<AddressFamily>,
    /// It looks up and changes entries of BPF maps.
    pub bpf_maps: bool,
}

/// ioctl(2) of terminals that types, or pastes, into the terminal as its user would.
const TIOCSTI: u64 = 0x5412;
const TIOCLINUX: u64 = 0x541c;
/// prctl(2) that names a mapping, as a C library does with those of malloc.
const PR_SET_VMA: u64 = 0x5356_4d41;

/// Lets all threads of this process make permitted system calls only: others fail with EPERM, some end the
/// process. The audit log of the kernel shows both. Cannot be undone.
///
/// # Errors
/// Errors of seccomp(2).
pub fn filter_calls(policy: &CallPolicy) -> io::Result<()> {
    let eperm = SeccompAction::Errno(libc::EPERM as u32);
    let fatal = list(FATAL).filter(|(call, _)| !(policy.bpf_maps && *call == libc::SYS_bpf));
    let fatal = compile(fatal, SeccompAction::Allow, SeccompAction::KillProcess)?;
    install(&fatal, libc::SECCOMP_FILTER_FLAG_LOG)?;
    install(&without_clone3()?, 0)?;
    // The last one: it permits no further filter.
    let permitted = compile(permitted(policy)?, eperm, SeccompAction::Allow)?;
    install(&permitted, libc::SECCOMP_FILTER_FLAG_LOG).map(drop)
}

/// Lets a supervisor make no call that neither it nor its successors need.
///
/// # Errors
/// Errors of seccomp(2).
pub fn filter_supervisor_calls() -> io::Result<()> {
    let fatal = list(FATAL_SUPERVISED);
    let fatal = compile(fatal, SeccompAction::Allow, SeccompAction::KillProcess)?;
    install(&fatal, libc::SECCOMP_FILTER_FLAG_LOG).map(drop)
}

/// As [`filter_calls`], with all calls executed: the others are announced on the descriptor, one after the other.
pub(super) fn watch_calls(policy: &CallPolicy) -> io::Result<OwnedFd> {
    install(&without_clone3()?, 0)?;
    let mut program = compile(permitted(policy)?, SeccompAction::Log, SeccompAction::Allow)?;
    for instruction in &mut program {
        // The crate has no such action. The constant is in instructions that return it only.
        if instruction.k == libc::SECCOMP_RET_LOG {
            instruction.k = libc::SECCOMP_RET_USER_NOTIF;
        }
    }
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH;
    let listener = install(&program, flags)?;
    // SAFETY: the call has made this descriptor, and nothing else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(listener) })
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn list(calls: Calls) -> impl Iterator<Item = (i64, Vec<SeccompRule>)> {
    calls.iter().map(|(number, _)| (*number, Vec::new()))
}

/// clone3(2) has its flags in memory, where no filter sees them. Without it C libraries use clone(2).
fn without_clone3() -> io::Result<BpfProgram> {
    let enosys = SeccompAction::Errno(libc::ENOSYS as u32);
    let rules = [(libc::SYS_clone3, Vec::new())];
    compile(rules, SeccompAction::Allow, enosys)
}

/// The permitted calls: a call with several rules is permitted if one of them holds.
fn permitted(policy: &CallPolicy) -> io::Result<Rules> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    // The kernel looks at 32 bits of these arguments.
    let rule = |conditions: &[(u8, SeccompCmpOp, u64)]| {
        let conditions = conditions.iter().map(|(index, operator, value)| {
            SeccompCondition::new(*index, SeccompCmpArgLen::Dword, operator.clone(), *value)
        });
        let conditions = conditions.collect::<Result<Vec<_>, _>>();
        conditions
            .and_then(SeccompRule::new)
            .map_err(io::Error::other)
    };
    let (unix, own) = (libc::AF_UNIX as u64, u64::from(std::process::id()));
    let not_executable = [(2, MaskedEq(libc::PROT_EXEC as u64), 0)];
    // Memory and signal handlers in common, and no new namespace.
    let thread = libc::CLONE_VM | libc::CLONE_THREAD;
    let namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET;
    let thread_flags = (thread | namespaces) as u32;
    let names = [
        libc::PR_SET_NAME as u64,
        libc::PR_GET_NAME as u64,
        PR_SET_VMA,
    ];
    let mut families = vec![rule(&[(0, Eq, unix)])?];
    for family in &policy.families {
        families.push(rule(&[(0, Eq, family.as_raw().into())])?);
    }
    let conditional = [
        (libc::SYS_socket, families),
        (libc::SYS_socketpair, vec![rule(&[(0, Eq, unix)])?]),
        (libc::SYS_mmap, vec![rule(&not_executable)?]),
        (libc::SYS_mprotect, vec![rule(&not_executable)?]),
        (
            libc::SYS_clone,
            vec![rule(&[(0, MaskedEq(thread_flags.into()), thread as u64)])?],
        ),
        (
            libc::SYS_ioctl,
            vec![rule(&[(1, Ne, TIOCSTI), (1, Ne, TIOCLINUX)])?],
        ),
        (
            libc::SYS_prctl,
            names
                .iter()
                .map(|name| rule(&[(0, Eq, *name)]))
                .collect::<io::Result<_>>()?,
        ),
        // Of this process.
        (libc::SYS_prlimit64, vec![rule(&[(0, Eq, 0)])?]),
        (libc::SYS_tgkill, vec![rule(&[(0, Eq, own)])?]),
    ];
    let mut rules: Rules = list(PERMITTED).chain(list(PERMITTED_OLD)).collect();
    rules.extend(conditional);
    if policy.bpf_maps {
        let commands = [1, 2, 3].map(|command| rule(&[(0, Eq, command)]));
        rules.insert(
            libc::SYS_bpf,
            commands.into_iter().collect::<io::Result<_>>()?,
        );
    }
    Ok(rules)
}

fn compile(
    rules: impl IntoIterator<Item = (i64, Vec<SeccompRule>)>,
    otherwise: SeccompAction,
    action: SeccompAction,
) -> io::Result<BpfProgram> {
    let architecture = std::env::consts::ARCH
        .try_into()
        .map_err(io::Error::other)?;
    let rules = rules.into_iter().collect();
    let filter = SeccompFilter::new(rules, otherwise, action, architecture);
    filter
        .and_then(BpfProgram::try_from)
        .map_err(io::Error::other)
}

/// Installs a filter for all threads. Returns what seccomp(2) does.
fn install(program: &BpfProgram, flags: libc::c_ulong) -> io::Result<i32> {
    rustix::thread::set_no_new_privs(true)?;
    let length = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog {
        len: length,
        filter: program.as_ptr().cast_mut().cast(),
    };
    let flags = flags | libc::SECCOMP_FILTER_FLAG_TSYNC;
    let set = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: `program` and its instructions, which both crates lay out as the kernel does, live until the call
    // returns; the kernel copies them.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, set, flags, &raw const program) };
    match result {
        ..=-1 => Err(io::Error::last_os_error()),
        // With TSYNC alone, the number of a thread that has another filter.
        1.. if flags & libc::SECCOMP_FILTER_FLAG_NEW_LISTENER == 0 => Err(io::Error::other(
            format!("thread {result} has a filter of its own"),
        )),
        // A descriptor, or 0.
        result => Ok(result as i32),
    }
}
