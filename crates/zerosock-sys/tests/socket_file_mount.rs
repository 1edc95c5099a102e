//! A file system that another user has mounted at the path of a socket, and whose server answers
//! nothing.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::net::SocketType;
use zerosock_sys::socket_file::{self, BindError, Options};

const DEADLINE: Duration = Duration::from_secs(60);

/// Mounts a file system of which only the root exists, a file of this mode, in a mount namespace of
/// this thread.
fn mount(device: &File, path: &Path, mode: u32) -> io::Result<()> {
    let check = |result| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    let text = |text: &[u8]| CString::new(text).unwrap();
    let (name, kind, root) = (text(b"zerosock-test"), text(b"fuse"), text(b"/"));
    let path = text(path.as_os_str().as_bytes());
    let device = device.as_raw_fd();
    let options = format!("fd={device},rootmode={mode:o},user_id=0,group_id=0,default_permissions");
    let options = text(options.as_bytes());
    let none = std::ptr::null();
    // SAFETY: changes the mount namespace of this thread alone.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: `root` is a string; the other pointers may be null.
    check(unsafe { libc::mount(none, root.as_ptr(), none, private, none.cast()) })?;
    let data = options.as_ptr().cast();
    // SAFETY: all are strings that live until the call returns.
    check(unsafe { libc::mount(name.as_ptr(), path.as_ptr(), kind.as_ptr(), 0, data) })
}

fn bind(path: &Path) -> Result<(), BindError> {
    let options = Options {
        kind: SocketType::STREAM,
        mode: None,
        gid: None,
        backlog: 1,
        refuse_rights: false,
        lock_wait: Duration::ZERO,
    };
    socket_file::bind(path, options).map(drop)
}

/// Binds at a path at which that is mounted. The error of the outer result: it cannot be.
fn bind_at_mount(path: PathBuf, mode: u32) -> io::Result<Result<(), BindError>> {
    // The server that answers nothing. When it is closed, what waits for it goes on.
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    let (done, result) = channel();
    let ours = device.try_clone()?;
    std::thread::spawn(move || {
        let mounted = mount(&ours, &path, mode);
        drop(ours);
        done.send(mounted.map(|()| bind(&path)))
    });
    result
        .recv_timeout(DEADLINE)
        .expect("it waits for the server")
}

#[test]
fn a_mount_at_the_socket_path_is_refused_without_a_call_to_its_server() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    File::create(&file).unwrap();
    let socket = dir.path().join("socket");
    drop(UnixListener::bind(&socket).unwrap());
    for (path, mode) in [(file, 0o100_666), (socket, 0o140_666)] {
        match bind_at_mount(path, mode) {
            Ok(Err(BindError::Make(error))) => {
                assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
            }
            Ok(other) => panic!("{other:?}"),
            Err(error) => {
                let test = "a_mount_at_the_socket_path_is_refused_without_a_call_to_its_server";
                return println!("SKIPPED: {test}: no FUSE: {error}");
            }
        }
    }
}
