//! The system calls that the filter permits, and those that end the process.

/// Pairs of number and name.
pub(super) type Calls = &'static [(i64, &'static str)];

macro_rules! calls {
    ($(#[$doc:meta])* $list:ident: $($name:ident)*) => {
        $(#[$doc])*
        pub(super) const $list: Calls =
            &[$((number(libc::$name), stringify!($name))),*];
    };
}

/// The numbers have this type on all platforms that the command is built for.
const fn number(number: libc::c_long) -> i64 {
    number
}

calls! {
    /// Permitted whatever their arguments are, so the kernel remembers that they are and does not run the filter
    /// (Linux 5.11). All calls of the packet path are here.
    PERMITTED:
    // Bytes.
    SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev SYS_preadv2
    SYS_pwritev2 SYS_sendto SYS_sendmsg SYS_sendmmsg SYS_recvfrom SYS_recvmsg SYS_recvmmsg SYS_splice SYS_tee
    SYS_vmsplice SYS_sendfile SYS_io_setup SYS_io_submit SYS_io_cancel SYS_io_destroy SYS_io_getevents
    // Readiness and time.
    SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_ppoll SYS_pselect6 SYS_eventfd2
    SYS_timerfd_create SYS_timerfd_settime SYS_timerfd_gettime SYS_clock_gettime SYS_clock_getres
    SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday
    // Sockets; which kinds, `socket` decides.
    SYS_bind SYS_listen SYS_accept SYS_accept4 SYS_connect SYS_shutdown SYS_getsockname SYS_getpeername
    SYS_setsockopt SYS_getsockopt
    // Descriptors and files; which files, mounts and Landlock decide.
    SYS_close SYS_close_range SYS_dup SYS_dup3 SYS_fcntl SYS_pipe2 SYS_openat SYS_openat2 SYS_fstat
    SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs SYS_readlinkat SYS_faccessat SYS_faccessat2 SYS_getdents64
    SYS_lseek SYS_flock SYS_mkdirat SYS_unlinkat SYS_renameat SYS_renameat2 SYS_fchmod SYS_fchmodat
    SYS_fchmodat2 SYS_fchown SYS_fchownat SYS_umask SYS_getcwd SYS_ftruncate SYS_fallocate SYS_memfd_create
    // Memory; `mmap` and `mprotect` have a condition.
    SYS_munmap SYS_mremap SYS_madvise SYS_brk SYS_mlock SYS_munlock SYS_membarrier
    // Threads and signals of this process.
    SYS_futex SYS_futex_waitv SYS_set_robust_list SYS_get_robust_list SYS_rseq SYS_set_tid_address
    SYS_sched_yield SYS_sched_getaffinity SYS_sched_setaffinity SYS_getcpu SYS_gettid SYS_getpid SYS_getppid
    SYS_exit SYS_exit_group SYS_restart_syscall SYS_sigaltstack SYS_rt_sigaction SYS_rt_sigprocmask
    SYS_rt_sigreturn SYS_rt_sigpending SYS_rt_sigtimedwait
    // What this process is.
    SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getresuid SYS_getresgid SYS_getgroups SYS_capget
    SYS_getrusage SYS_sysinfo SYS_uname SYS_getrandom
    // Its answer is ENOSYS, by another filter: its arguments lie in memory, and `clone` is used then.
    SYS_clone3
}

#[cfg(target_arch = "x86_64")]
calls! {
    /// Older forms, which this architecture has beside the others.
    PERMITTED_OLD:
    SYS_open SYS_stat SYS_lstat SYS_access SYS_readlink SYS_unlink SYS_mkdir SYS_rmdir SYS_rename SYS_chmod
    SYS_chown SYS_lchown SYS_poll SYS_select SYS_epoll_wait SYS_epoll_create SYS_eventfd SYS_pipe SYS_dup2
    SYS_time SYS_getrlimit
}
#[cfg(not(target_arch = "x86_64"))]
pub(super) const PERMITTED_OLD: Calls = &[];

calls! {
    /// What no correct code of a confined process calls, and an attacker does. They end the process.
    FATAL:
    SYS_execve SYS_execveat SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_process_madvise
    SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_setns SYS_unshare SYS_open_tree SYS_move_mount SYS_fsopen
    SYS_fsmount SYS_fsconfig SYS_fspick SYS_mount_setattr SYS_bpf SYS_init_module SYS_finit_module
    SYS_delete_module SYS_kexec_load SYS_kexec_file_load SYS_reboot SYS_swapon SYS_swapoff SYS_setuid
    SYS_setgid SYS_setresuid SYS_setresgid SYS_setgroups SYS_perf_event_open SYS_userfaultfd SYS_keyctl
    SYS_add_key SYS_request_key SYS_open_by_handle_at SYS_pidfd_getfd SYS_acct SYS_personality
}

calls! {
    /// What neither the supervisor nor a process that it starts calls. The processes that it starts inherit its
    /// filter, so it cannot have more.
    FATAL_SUPERVISED:
    SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_process_madvise SYS_init_module SYS_finit_module
    SYS_delete_module SYS_kexec_load SYS_kexec_file_load SYS_reboot SYS_swapon SYS_swapoff SYS_setns SYS_chroot
    SYS_perf_event_open SYS_userfaultfd SYS_keyctl SYS_add_key SYS_request_key SYS_open_by_handle_at
    SYS_pidfd_getfd SYS_acct SYS_settimeofday SYS_clock_settime SYS_clock_adjtime SYS_adjtimex SYS_quotactl
    SYS_sethostname SYS_setdomainname SYS_vhangup SYS_syslog
}

/// The name of a call, if this module knows it.
pub(super) fn name_of(number: i64) -> Option<&'static str> {
    let all = [
        PERMITTED,
        PERMITTED_OLD,
        FATAL,
        FATAL_SUPERVISED,
        CONDITIONAL,
    ];
    let found = all.into_iter().flatten().find(|(it, _)| *it == number);
    found.map(|(_, name)| name.trim_start_matches("SYS_"))
}

calls! {
    /// Permitted with some arguments, or often called by libraries.
    CONDITIONAL:
    SYS_socket SYS_socketpair SYS_mmap SYS_mprotect SYS_clone SYS_ioctl SYS_prctl SYS_prlimit64 SYS_tgkill
    SYS_kill SYS_pidfd_open SYS_pidfd_send_signal SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register
    SYS_capset SYS_linkat SYS_symlinkat SYS_mknodat SYS_setrlimit SYS_wait4 SYS_waitid SYS_shmget SYS_shmat
    SYS_msync SYS_mincore SYS_mlockall SYS_signalfd4 SYS_inotify_init1 SYS_fsync SYS_fdatasync SYS_sync
}
