//! A file system that another user has mounted at the path of a socket or on the way to it, and whose
//! server answers nothing.

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
use zerosock_sys::socket_file::{self, BindError, SocketFileOptions};
use zerosock_sys::socket_path;

const DEADLINE: Duration = Duration::from_secs(300);

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives this thread a mount namespace of its own.
fn isolate() -> io::Result<()> {
    let (none, private) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
    // SAFETY: changes the mount namespace of this thread alone.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    // SAFETY: the path is a string; the other pointers may be null.
    check(unsafe { libc::mount(none, c"/".as_ptr(), none, private, none.cast()) })
}

/// Mounts a file system of which only the root exists, a file of this mode, in a mount namespace of
/// this thread. All users may use it; it belongs to `user`.
fn mount(device: &File, path: &Path, mode: u32, user: u32) -> io::Result<()> {
    let text = |text: &[u8]| CString::new(text).unwrap();
    let (name, kind) = (text(b"zerosock-test"), text(b"fuse"));
    let path = text(path.as_os_str().as_bytes());
    let device = device.as_raw_fd();
    let options = format!(
        "fd={device},rootmode={mode:o},user_id={user},group_id=0,default_permissions,allow_other"
    );
    let options = text(options.as_bytes());
    isolate()?;
    let data = options.as_ptr().cast();
    // SAFETY: all are strings that live until the call returns.
    check(unsafe { libc::mount(name.as_ptr(), path.as_ptr(), kind.as_ptr(), 0, data) })
}

fn bind(path: &Path) -> Result<(), BindError> {
    let options = SocketFileOptions {
        kind: SocketType::STREAM,
        mode: None,
        gid: None,
        backlog: 1,
        refuse_rights: false,
        reserved: false,
        lock_wait: Duration::ZERO,
    };
    socket_file::bind(path, options).map(drop)
}

/// Acts while that is mounted at a path. The error: it cannot be.
fn at_mount<T: Send + 'static>(
    path: PathBuf,
    mode: u32,
    user: u32,
    act: impl FnOnce(&Path) -> T + Send + 'static,
) -> io::Result<T> {
    // The server that answers nothing. When it is closed, what waits for it goes on.
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    let (done, result) = channel();
    let ours = device.try_clone()?;
    std::thread::spawn(move || {
        let mounted = mount(&ours, &path, mode, user);
        drop(ours);
        done.send(mounted.map(|()| act(&path)))
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
        match at_mount(path, mode, 0, bind) {
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

#[test]
fn a_mount_of_another_user_on_the_way_is_refused_without_a_call_to_its_server() {
    let dir = tempfile::tempdir().unwrap();
    let way = dir.path().join("way");
    std::fs::create_dir(&way).unwrap();
    let tried = at_mount(way.clone(), 0o40_755, 65534, |way| {
        let path = way.join("s");
        let found = socket_path::find(&path).map(drop);
        (socket_path::find_cached(&path), found, bind(&path))
    });
    let (cached, found, bound) = match tried {
        Ok(tried) => tried,
        Err(error) => return println!("SKIPPED: no FUSE: {error}"),
    };
    assert!(matches!(cached, Ok(None)), "{cached:?}");
    let bound = match bound {
        Err(BindError::Make(error)) => Err(error),
        other => panic!("{other:?}"),
    };
    for result in [found, bound] {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        let wanted = format!("{}: a file system of user 65534 (FUSE)", way.display());
        assert!(error.to_string().starts_with(&wanted), "{error}");
    }
}

#[test]
fn without_proc_a_path_is_refused_for_that_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let tried = std::thread::spawn(move || {
        isolate()?;
        // SAFETY: the path is a string.
        check(unsafe { libc::umount2(c"/proc".as_ptr(), libc::MNT_DETACH) })?;
        io::Result::Ok(socket_path::find(&path).map(drop))
    });
    match tried.join().unwrap() {
        Ok(found) => {
            let error = found.unwrap_err().to_string();
            assert!(error.contains("/proc is not mounted"), "{error}");
        }
        Err(error) => println!("SKIPPED: without_proc: no mount namespace: {error}"),
    }
}
