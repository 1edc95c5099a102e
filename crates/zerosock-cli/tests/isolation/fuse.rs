//! A FUSE file system in this process with one file; its requests can be left unanswered.
//!
//! It is mounted in a mount namespace of one thread, so that nothing remains after the test.
//! Numbers and structures are those of linux/fuse.h.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// Length of a request's header.
const HEADER: usize = 40;
/// Bytes of the file.
const SIZE: u64 = 1 << 20;

/// The server. Dropping it aborts the connection, which ends all waits for it.
pub(crate) struct FuseServer {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

/// Why the FUSE attacks are skipped. If such an attack succeeds, threads of the daemon sleep in a
/// way that not even SIGKILL ends, until `/sys/fs/fuse/connections` is used: so the attacks are
/// opt-in.
pub(crate) fn not_asked_for() -> Option<String> {
    let asked = std::env::var_os("ZEROSOCK_TEST_FUSE").is_some();
    (!asked).then(|| "set ZEROSOCK_TEST_FUSE=1 to hold threads in files on FUSE".into())
}

impl FuseServer {
    /// Starts the server and opens its file. Requests of the process `unanswered` are not answered.
    ///
    /// # Errors
    /// When this user may not mount, or there is no FUSE.
    pub(crate) fn start(unanswered: u32) -> io::Result<(OwnedFd, FuseServer)> {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/fuse")?;
        let (stop, stopped) = UnixStream::pair()?;
        let dir = tempfile::tempdir()?;
        let path = dir.path().to_owned();
        // A thread of its own: it leaves the mount namespace of the others.
        let open = std::thread::spawn(move || {
            mount(device.as_raw_fd(), &path, 0)?;
            let server = FuseServer {
                stop: Some(stop),
                thread: Some(std::thread::spawn(move || {
                    serve(device, &stopped, unanswered)
                })),
            };
            let mut options = File::options();
            let file = options.read(true).write(true).open(path.join("file"))?;
            io::Result::Ok((file, server))
        });
        let (file, server) = open.join().unwrap()?;
        Ok((file.into(), server))
    }
}

/// Mounts a file system of another user that answers nothing, in a mount namespace of this thread and of the
/// processes that it starts. When the result is dropped, all that waits for it goes on.
///
/// # Errors
/// When this user may not mount, or there is no FUSE.
pub(crate) fn mount_silent(dir: &Path, user: u32) -> io::Result<File> {
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    mount(device.as_raw_fd(), dir, user)?;
    Ok(device)
}

impl Drop for FuseServer {
    fn drop(&mut self) {
        self.stop = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Mounts a file system that belongs to `user` and that all may use, in a mount namespace of this thread.
fn mount(device: i32, dir: &Path, user: u32) -> io::Result<()> {
    let check = |result| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    let text = |text: &str| std::ffi::CString::new(text).unwrap();
    let (name, kind, root) = (text("zerosock-test"), text("fuse"), text("/"));
    let dir = text(dir.to_str().unwrap());
    let options = format!("fd={device},rootmode=40000,user_id={user},group_id=0,allow_other");
    let options = text(&options);
    let none = std::ptr::null();
    // SAFETY: changes the mount namespace of this thread alone.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: `root` is a string; the other pointers may be null.
    check(unsafe { libc::mount(none, root.as_ptr(), none, private, none.cast()) })?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    let data = options.as_ptr().cast();
    // SAFETY: all are strings that live until the call returns.
    check(unsafe { libc::mount(name.as_ptr(), dir.as_ptr(), kind.as_ptr(), flags, data) })
}

/// Answers requests until the other end of `stopped` is closed. Unanswered requests end with the
/// device.
fn serve(mut device: File, stopped: &UnixStream, unanswered: u32) {
    let mut request = vec![0; 1 << 17];
    loop {
        let mut fds = [
            PollFd::new(&device, PollFlags::IN),
            PollFd::new(stopped, PollFlags::IN),
        ];
        poll(&mut fds, None).unwrap();
        if !fds[1].revents().is_empty() {
            return;
        }
        match device.read(&mut request) {
            Ok(length) => answer(&mut device, &request[..length], unanswered),
            // Nothing there, or the request was withdrawn.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOENT)) => {}
            // Not mounted any more.
            Err(_) => return,
        }
    }
}

fn answer(device: &mut File, request: &[u8], unanswered: u32) {
    let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
    let (opcode, node, caller) = (word(4), word(16), word(32));
    let thread = format!("/proc/{unanswered}/task/{caller}");
    if Path::new(&thread).exists() || matches!(opcode, INTERRUPT | FORGET | BATCH_FORGET) {
        return;
    }
    let body = match opcode {
        INIT => init(),
        LOOKUP => entry(),
        GETATTR => [vec![0; 16], attributes(node == 1)].concat(),
        OPEN => vec![0; 16],
        FLUSH | RELEASE => Vec::new(),
        _ => return respond(device, request, -libc::ENOSYS, &[]),
    };
    respond(device, request, 0, &body);
}

fn respond(device: &mut File, request: &[u8], error: i32, body: &[u8]) {
    assert!(request.len() >= HEADER);
    let length = (16 + body.len()) as u32;
    let mut answer = length.to_ne_bytes().to_vec();
    answer.extend(error.to_ne_bytes());
    // The request's number.
    answer.extend(&request[8..16]);
    answer.extend(body);
    // The requesting process may have ended meanwhile.
    let _ = device.write(&answer);
}

/// Version 7.31 without optional features.
fn init() -> Vec<u8> {
    let mut body = vec![0; 64];
    body[..4].copy_from_slice(&7u32.to_ne_bytes());
    body[4..8].copy_from_slice(&31u32.to_ne_bytes());
    // max_write
    body[20..24].copy_from_slice(&65536u32.to_ne_bytes());
    body
}

/// Any name is the one file, node 2.
fn entry() -> Vec<u8> {
    let mut body = vec![0; 40];
    body[..8].copy_from_slice(&2u64.to_ne_bytes());
    [body, attributes(false)].concat()
}

fn attributes(is_root: bool) -> Vec<u8> {
    let (node, mode, size) = match is_root {
        true => (1u64, 0o40755u32, 0),
        false => (2, 0o100666, SIZE),
    };
    let mut body = vec![0; 88];
    body[..8].copy_from_slice(&node.to_ne_bytes());
    body[8..16].copy_from_slice(&size.to_ne_bytes());
    body[60..64].copy_from_slice(&mode.to_ne_bytes());
    // nlink
    body[64..68].copy_from_slice(&1u32.to_ne_bytes());
    body
}
