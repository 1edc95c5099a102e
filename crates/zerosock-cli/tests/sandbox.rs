//! An exploit stand-in: system calls of the test's choice, made by a thread of a confined process. The test stops the
//! thread and sets its registers by ptrace(2). The filter, Landlock and the namespace treat them as that thread's own.
//!
//! What fails here is out of reach for code of an attacker in the process; docs/sandbox.md lists what is not.
#![cfg(target_arch = "x86_64")]

use std::fs::{self, File};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use libc::{EACCES, ENOENT, ENOSYS, EPERM, EROFS, EXDEV};

use crate::process::{Running, wait_until, zerosock};

/// A thread that makes the test's system calls.
struct Thread {
    id: libc::pid_t,
    memory: File,
    saved: libc::user_regs_struct,
    /// Address of a `syscall` instruction.
    instruction: u64,
}

/// What became of a call.
#[derive(Debug, Eq, PartialEq)]
enum Outcome {
    Returned(i64),
    Killed(i32),
}

fn failed(errno: i32) -> Outcome {
    Outcome::Returned(-i64::from(errno))
}

fn ptrace(request: libc::c_uint, id: libc::pid_t, data: *mut libc::user_regs_struct) {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: requests with registers read or write a structure that lives as long as the call; the others get null.
    let result = unsafe { libc::ptrace(request, id, none, data) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

impl Thread {
    /// Stops the main thread of a process.
    fn stop(process: u32) -> Thread {
        let id = process as libc::pid_t;
        let null = std::ptr::null_mut();
        ptrace(libc::PTRACE_SEIZE, id, null);
        ptrace(libc::PTRACE_INTERRUPT, id, null);
        assert!(libc::WIFSTOPPED(wait_for(id)));
        // SAFETY: it consists of integers.
        let mut saved: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        ptrace(libc::PTRACE_GETREGS, id, &mut saved);
        let path = format!("/proc/{process}/mem");
        let memory = File::options().read(true).write(true).open(path).unwrap();
        let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
        let code = maps.lines().find(|line| line.ends_with("[vdso]")).unwrap();
        let (start, rest) = code.split_once('-').unwrap();
        let end = rest.split_once(' ').unwrap().0;
        let [start, end] = [start, end].map(|it| u64::from_str_radix(it, 16).unwrap());
        let mut bytes = vec![0; (end - start) as usize];
        memory.read_exact_at(&mut bytes, start).unwrap();
        let at = bytes.windows(2).position(|it| it == [0x0f, 0x05]).unwrap();
        Thread {
            id,
            memory,
            saved,
            instruction: start + at as u64,
        }
    }

    /// Puts bytes below the stack, in one of eight places. Returns their address.
    fn put(&self, place: u64, bytes: &[u8]) -> u64 {
        let at = self.saved.rsp - 4096 - 512 * place;
        self.memory.write_all_at(bytes, at).unwrap();
        at
    }

    fn text(&self, place: u64, text: impl AsRef<Path>) -> u64 {
        let text = text.as_ref().to_str().unwrap();
        self.put(place, format!("{text}\0").as_bytes())
    }

    fn call(&self, number: i64, arguments: &[u64]) -> Outcome {
        let argument = |index: usize| arguments.get(index).copied().unwrap_or(0);
        let mut registers = libc::user_regs_struct {
            rip: self.instruction,
            rax: number as u64,
            orig_rax: u64::MAX,
            rdi: argument(0),
            rsi: argument(1),
            rdx: argument(2),
            r10: argument(3),
            r8: argument(4),
            r9: argument(5),
            ..self.saved
        };
        ptrace(libc::PTRACE_SETREGS, self.id, &mut registers);
        ptrace(libc::PTRACE_SINGLESTEP, self.id, std::ptr::null_mut());
        let status = wait_for(self.id);
        if libc::WIFSIGNALED(status) {
            return Outcome::Killed(libc::WTERMSIG(status));
        }
        ptrace(libc::PTRACE_GETREGS, self.id, &mut registers);
        Outcome::Returned(registers.rax as i64)
    }

    /// A call that must succeed.
    fn succeed(&self, number: i64, arguments: &[u64]) -> u64 {
        match self.call(number, arguments) {
            Outcome::Returned(result @ 0..) => result as u64,
            other => panic!("call {number}: {other:?}"),
        }
    }

    fn open(&self, path: impl AsRef<Path>, flags: i32) -> Outcome {
        let path = self.text(0, path);
        self.call(
            libc::SYS_openat,
            &[libc::AT_FDCWD as u64, path, flags as u64, 0o600],
        )
    }

    fn socket(&self, family: i32) -> Outcome {
        self.call(
            libc::SYS_socket,
            &[family as u64, libc::SOCK_DGRAM as u64, 0],
        )
    }

    /// connect(2) of a new Unix socket; a name that begins with a zero byte is abstract.
    fn connect(&self, name: &[u8]) -> Outcome {
        let socket = self.succeed(
            libc::SYS_socket,
            &[libc::AF_UNIX as u64, libc::SOCK_STREAM as u64, 0],
        );
        let address = [&(libc::AF_UNIX as u16).to_ne_bytes(), name].concat();
        let at = self.put(0, &address);
        self.call(libc::SYS_connect, &[socket, at, address.len() as u64])
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        let null = std::ptr::null_mut::<libc::c_void>();
        let saved = &raw mut self.saved;
        // SAFETY: as in `ptrace`. Fails if the process has ended.
        unsafe {
            libc::ptrace(libc::PTRACE_SETREGS, self.id, null, saved);
            libc::ptrace(libc::PTRACE_DETACH, self.id, null, null);
        }
    }
}

fn wait_for(id: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: `status` is an int that lives as long as the call.
    let waited = unsafe { libc::waitpid(id, &mut status, libc::__WALL) };
    assert_eq!(waited, id, "{}", std::io::Error::last_os_error());
    status
}

/// A directory of a configuration, one of another user, and a process.
struct Lab {
    dir: tempfile::TempDir,
    elsewhere: tempfile::TempDir,
    process: Running,
}

impl Lab {
    /// `arguments`: with `@` for the directory. `None`: this user may not trace.
    fn start(arguments: &[&str], user: Option<u32>) -> Option<Lab> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: only root may trace a confined process");
            return None;
        }
        let [dir, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        for dir in [&dir, &elsewhere] {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        }
        fs::write(elsewhere.path().join("key"), "secret").unwrap();
        fs::write(dir.path().join("file"), "text").unwrap();
        let at = dir.path().display().to_string();
        let mut command = zerosock();
        command.args(arguments.iter().map(|it| it.replace('@', &at)));
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        let process = Running::start(&mut command);
        let lab = Lab {
            dir,
            elsewhere,
            process,
        };
        wait_until("a socket", || lab.at("vm").exists());
        // The filter is the last step before anything is served.
        wait_until("the sandbox", || {
            lab.process.stderr().contains(" sandbox mode=")
        });
        Some(lab)
    }

    fn serve(more: &[&str], user: Option<u32>) -> Option<Lab> {
        let arguments = ["serve", "--socket", "@/vm", "--uds-path", "@/uds"];
        Lab::start(&[&arguments, more].concat(), user)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn elsewhere(&self, name: &str) -> PathBuf {
        self.elsewhere.path().join(name)
    }

    fn thread(&self) -> Thread {
        Thread::stop(self.process.child.id())
    }
}

#[test]
fn files_outside_the_configuration_are_out_of_reach() {
    let Some(lab) = Lab::serve(&[], None) else {
        return;
    };
    let thread = lab.thread();
    let elsewhere = lab.elsewhere("key");
    for path in [
        Path::new("/etc/shadow"),
        Path::new("/root"),
        &elsewhere,
        Path::new("/run"),
    ] {
        assert_eq!(
            thread.open(path, libc::O_RDONLY),
            failed(ENOENT),
            "{path:?}"
        );
    }
    let root = format!("/proc/{}/root/etc/shadow", std::process::id());
    assert_eq!(thread.open(root, libc::O_RDONLY), failed(ENOENT));
    // The root, and what is above it.
    for path in ["/new", "../../../../../../new", "/etc/new"] {
        let opened = thread.open(path, libc::O_CREAT | libc::O_WRONLY);
        let refused = [EACCES, ENOENT, EROFS].map(failed);
        assert!(refused.contains(&opened), "{path}: {opened:?}");
    }
    // Its own memory by its file, past the protection of pages.
    assert_eq!(thread.open("/proc/self/mem", libc::O_RDWR), failed(EACCES));
    // In the directories of its sockets it makes, and writes, no file.
    let flags = libc::O_CREAT | libc::O_WRONLY;
    assert_eq!(thread.open(lab.at("new"), flags), failed(EACCES));
    let listener = UnixListener::bind(lab.elsewhere("socket")).unwrap();
    let name = format!("{}\0", lab.elsewhere("socket").display());
    assert_eq!(thread.connect(name.as_bytes()), failed(ENOENT));
    drop(listener);
    // What is within reach: docs/sandbox.md.
    assert!(matches!(
        thread.open(lab.at("file"), libc::O_RDONLY),
        Outcome::Returned(0..)
    ));
    let other = UnixListener::bind(lab.at("other")).unwrap();
    let name = format!("{}\0", lab.at("other").display());
    assert_eq!(thread.connect(name.as_bytes()), Outcome::Returned(0));
    drop(other);
    let path = thread.text(0, lab.at("other"));
    thread.succeed(libc::SYS_unlink, &[path]);
}

#[test]
fn calls_that_a_configuration_does_not_need_fail() {
    let Some(lab) = Lab::serve(&[], None) else {
        return;
    };
    let thread = lab.thread();
    // AF_VSOCK is refused by the same comparison; the test makes no such socket.
    for family in [
        libc::AF_INET,
        libc::AF_INET6,
        libc::AF_NETLINK,
        libc::AF_PACKET,
        libc::AF_ALG,
    ] {
        assert_eq!(thread.socket(family), failed(EPERM), "{family}");
    }
    let own = u64::from(std::process::id());
    let anonymous = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let (read, executable) = (
        libc::PROT_READ as u64,
        (libc::PROT_READ | libc::PROT_EXEC) as u64,
    );
    let page = thread.succeed(libc::SYS_mmap, &[0, 4096, read, anonymous, u64::MAX, 0]);
    let params = thread.put(1, &[0; 120]);
    let text = thread.put(2, b"x\0");
    let file = thread.succeed(libc::SYS_memfd_create, &[text, 0]);
    let new_user = (libc::CLONE_NEWUSER | libc::CLONE_VM | libc::CLONE_THREAD) as u64;
    for (what, number, arguments) in [
        ("a signal to another process", libc::SYS_kill, &[own, 0][..]),
        ("a signal to its thread", libc::SYS_tgkill, &[own, own, 0]),
        ("its limits", libc::SYS_prlimit64, &[own, 0, 0, params]),
        ("io_uring", libc::SYS_io_uring_setup, &[8, params]),
        (
            "executable memory",
            libc::SYS_mmap,
            &[0, 4096, executable, anonymous, u64::MAX, 0],
        ),
        (
            "executable memory of a file",
            libc::SYS_mmap,
            &[0, 4096, executable, 1, file, 0],
        ),
        (
            "memory made executable",
            libc::SYS_mprotect,
            &[page, 4096, executable],
        ),
        ("a process", libc::SYS_clone, &[libc::SIGCHLD as u64]),
        ("a process", libc::SYS_fork, &[]),
        ("a process", libc::SYS_vfork, &[]),
        ("a user namespace", libc::SYS_clone, &[new_user]),
        ("input of a terminal", libc::SYS_ioctl, &[0, 0x5412, text]),
        (
            "input of a terminal, in 64 bits",
            libc::SYS_ioctl,
            &[0, 0x1_0000_5412, text],
        ),
        ("a device", libc::SYS_mknod, &[text, 0o20600, 0x501]),
        ("a link", libc::SYS_symlink, &[text, text]),
        ("capabilities", libc::SYS_capset, &[params, params]),
        (
            "core dumps",
            libc::SYS_prctl,
            &[libc::PR_SET_DUMPABLE as u64, 1],
        ),
        ("another filter", libc::SYS_seccomp, &[1, 0, params]),
        ("a call without a name", 1000, &[]),
        ("a call of x32", 0x4000_0000 + libc::SYS_socket, &[2, 2, 0]),
    ] {
        assert_eq!(thread.call(number, arguments), failed(EPERM), "{what}");
    }
    assert_eq!(thread.call(libc::SYS_clone3, &[params, 88]), failed(ENOSYS));
    // An abstract socket of the host, which no path governs.
    let name = format!("\0zerosock-test-{own}");
    let address = SocketAddr::from_abstract_name(&name[1..]).unwrap();
    let _listener = UnixListener::bind_addr(&address).unwrap();
    assert_eq!(thread.connect(name.as_bytes()), failed(EPERM));
}

#[test]
fn calls_of_attackers_end_the_process() {
    for (number, arguments) in [
        (libc::SYS_execve, &[][..]),
        (libc::SYS_execveat, &[]),
        (libc::SYS_ptrace, &[16, 1]),
        (libc::SYS_process_vm_readv, &[1]),
        (libc::SYS_mount, &[]),
        (libc::SYS_unshare, &[libc::CLONE_NEWUSER as u64]),
        (libc::SYS_setns, &[]),
        (libc::SYS_bpf, &[5]),
        (libc::SYS_init_module, &[]),
        (libc::SYS_kexec_load, &[]),
        (libc::SYS_setuid, &[0]),
        (libc::SYS_personality, &[0x0040_0000]),
    ] {
        let Some(lab) = Lab::serve(&[], None) else {
            return;
        };
        let outcome = lab.thread().call(number, arguments);
        assert_eq!(outcome, Outcome::Killed(libc::SIGSYS), "{number}");
    }
}

/// Its directories are protected by Landlock alone, which governs connect(2) to paths in kernels of 2026 only.
#[test]
fn without_root_landlock_keeps_files_out_of_reach() {
    let Some(lab) = Lab::serve(&[], Some(65534)) else {
        return;
    };
    if !lab.process.stderr().contains("Landlock") {
        return println!("SKIPPED: the kernel has no Landlock of Linux 5.19");
    }
    let thread = lab.thread();
    for path in [
        Path::new("/etc/passwd"),
        &lab.elsewhere("key"),
        Path::new("/"),
    ] {
        assert_eq!(
            thread.open(path, libc::O_RDONLY),
            failed(EACCES),
            "{path:?}"
        );
    }
    let flags = libc::O_CREAT | libc::O_WRONLY;
    assert_eq!(thread.open(lab.elsewhere("new"), flags), failed(EACCES));
    let (from, to) = (
        thread.text(0, lab.elsewhere("key")),
        thread.text(1, lab.at("key")),
    );
    let moved = thread.call(libc::SYS_rename, &[from, to]);
    assert!(
        moved == failed(EACCES) || moved == failed(EXDEV),
        "{moved:?}"
    );
    assert!(matches!(
        thread.open(lab.at("file"), libc::O_RDONLY),
        Outcome::Returned(0..)
    ));
}

#[test]
fn a_listener_of_tcp_gives_no_way_to_connect_by_tcp() {
    let arguments = ["--listen", "tcp:127.0.8.1:0=3:22"];
    let Some(lab) = Lab::serve(&arguments, None) else {
        return;
    };
    let thread = lab.thread();
    let socket = thread.succeed(libc::SYS_socket, &[2, libc::SOCK_STREAM as u64, 0]);
    let listener = std::net::TcpListener::bind("127.0.8.2:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_be_bytes();
    let address = [&2u16.to_ne_bytes(), &port[..], &[127, 0, 8, 2], &[0; 8]].concat();
    let at = thread.put(0, &address);
    assert_eq!(
        thread.call(libc::SYS_connect, &[socket, at, 16]),
        failed(EACCES)
    );
}

#[test]
fn a_log_names_what_would_be_refused() {
    let Some(lab) = Lab::serve(&["--sandbox", "log"], None) else {
        return;
    };
    let thread = lab.thread();
    assert!(matches!(
        thread.socket(libc::AF_INET),
        Outcome::Returned(0..)
    ));
    drop(thread);
    let line = "would be refused: system call socket (number 41) with 0x2";
    wait_until(line, || lab.process.stderr().contains(line));
    lab.process.signal("TERM");
    assert_eq!(lab.process.finish().code, Some(0));
}

fn status(process: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix(field));
    value.unwrap().trim().to_owned()
}

/// Also after its process was ended for a call of attackers: a successor has the same sandbox.
#[test]
fn a_supervisor_starts_a_confined_successor() {
    let vm = "guest-cid=3,socket=@/vm,uds-path=@/uds";
    let arguments = ["serve", "--vm", vm, "--user", "nobody"];
    let Some(lab) = Lab::start(&arguments, None) else {
        return;
    };
    let supervisor = lab.process.child.id();
    let worker = || -> u32 {
        let path = format!("/proc/{supervisor}/task/{supervisor}/children");
        let mut found = None;
        wait_until("a worker process", || {
            found = fs::read_to_string(&path).unwrap().trim().parse().ok();
            found.is_some()
        });
        found.unwrap()
    };
    for round in 1..=2 {
        let sandboxes = || lab.process.stderr().matches(" sandbox mode=").count();
        wait_until("the sandbox", || sandboxes() == round);
        // Passed on when the process serves.
        lab.process.signal("USR1");
        wait_until("an answer", || {
            lab.process.stderr().matches(" counters ").count() >= round
        });
        let worker = worker();
        for set in ["CapPrm:", "CapEff:", "CapBnd:", "CapInh:", "CapAmb:"] {
            assert_eq!(status(worker, set), "0000000000000000", "{set}");
        }
        assert_eq!(
            status(worker, "Uid:").split_whitespace().next(),
            Some("65534")
        );
        assert_eq!(status(worker, "NoNewPrivs:"), "1");
        assert_eq!(fs::metadata(lab.at("vm")).unwrap().uid(), 65534);
        for thread in fs::read_dir(format!("/proc/{worker}/task")).unwrap() {
            let thread = thread.unwrap().file_name().into_string().unwrap();
            let thread = thread.parse().unwrap();
            assert_eq!(status(thread, "CapPrm:"), "0000000000000000");
            assert_eq!(status(thread, "Seccomp:"), "2");
        }
        let outcome = Thread::stop(worker).call(libc::SYS_execve, &[]);
        assert_eq!(outcome, Outcome::Killed(libc::SIGSYS));
        wait_until("its end", || {
            lab.process
                .stderr()
                .matches("a successor takes over")
                .count()
                == round
        });
    }
    // CAP_SYS_PTRACE and CAP_SYS_MODULE, which no successor needs.
    let capabilities = u64::from_str_radix(&status(supervisor, "CapPrm:"), 16).unwrap();
    assert_eq!(capabilities & (1 << 19 | 1 << 16), 0);
    let thread = lab.thread();
    let outcome = thread.call(libc::SYS_ptrace, &[16, 1]);
    assert_eq!(outcome, Outcome::Killed(libc::SIGSYS));
}

#[test]
fn a_reload_that_needs_more_is_refused_and_names_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let vm = |cid: u32, dir: &str| {
        format!("  - {{guest_cid: {cid}, socket: {dir}/vm{cid}, uds_path: {dir}/uds{cid}}}\n")
    };
    let here = dir.path().to_str().unwrap();
    let there = other.path().to_str().unwrap();
    fs::write(at("vms.yaml"), format!("vms:\n{}", vm(3, here))).unwrap();
    let mut serve = zerosock();
    serve.args(["serve", "--config", &at("vms.yaml")]);
    let serve = Running::start(&mut serve);
    wait_until("the sandbox", || serve.stderr().contains(" sandbox mode="));
    wait_until("a start", || serve.stderr().contains("serving cid=3"));
    if !serve.stderr().contains("has=\"a mount namespace")
        && !serve.stderr().contains("has=Landlock")
    {
        return println!("SKIPPED: files are not confined");
    }
    fs::write(
        at("vms.yaml"),
        format!("vms:\n{}{}", vm(3, here), vm(4, there)),
    )
    .unwrap();
    serve.signal("HUP");
    let line = format!(
        "does not permit the directory {there}: restart it, or start it with --sandbox off"
    );
    wait_until(&line, || serve.stderr().contains(&line));
    assert!(serve.stderr().contains("nothing was changed"));
    fs::write(
        at("vms.yaml"),
        format!("vms:\n{}{}", vm(3, here), vm(4, here)),
    )
    .unwrap();
    serve.signal("HUP");
    wait_until("the new VM", || dir.path().join("vm4").exists());
    serve.signal("TERM");
    assert_eq!(serve.finish().code, Some(0));
    assert!(!dir.path().join("vm4").exists());
}
