use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;

const OPTIONS: SocketFileOptions = SocketFileOptions {
    kind: SocketType::STREAM,
    mode: None,
    gid: None,
    backlog: 16,
    refuse_rights: false,
    reserved: false,
    lock_wait: Duration::from_secs(10),
};

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().file_name().into())
        .collect();
    names.sort();
    names
}

#[test]
fn a_link_put_in_the_place_of_the_socket_is_not_followed() {
    let directory = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    fs::write(&victim, "kept").unwrap();
    fs::set_permissions(&victim, fs::Permissions::from_mode(0o600)).unwrap();
    let before = fs::metadata(&victim).unwrap();
    let (path, link) = (directory.path().join("s"), directory.path().join("link"));
    // Root runs the attack as another user would: directory and link are not root's.
    let other = rustix::process::geteuid().is_root().then_some(65534);
    std::os::unix::fs::chown(directory.path(), other, other).unwrap();
    let stop = AtomicBool::new(false);
    let placed = AtomicU32::new(0);
    let mut made = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let prepare = || {
                symlink(&victim, &link).unwrap();
                std::os::unix::fs::lchown(&link, other, other).unwrap();
            };
            prepare();
            while !stop.load(Ordering::Relaxed) {
                let is_socket = |found: fs::Metadata| found.file_type().is_socket();
                if fs::symlink_metadata(&path).is_ok_and(is_socket) {
                    fs::rename(&link, &path).unwrap();
                    placed.fetch_add(1, Ordering::Relaxed);
                    prepare();
                }
            }
        });
        let deadline = Instant::now() + Duration::from_secs(30);
        while placed.load(Ordering::Relaxed) < 300 && Instant::now() < deadline {
            let options = SocketFileOptions {
                mode: Some(Mode::from_raw_mode(0o666)),
                gid: other.map(Gid::from_raw),
                ..OPTIONS
            };
            let bound = bind(&path, options);
            made += u32::from(bound.is_ok());
            match &bound {
                // The socket file is removed only while it is ours: the link stays.
                Ok(_) | Err(BindError::NotASocket | BindError::InUse) => {}
                Err(error) => panic!("{error}"),
            }
            drop(bound);
            let _ = fs::remove_file(&path);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(made > 0 && placed.load(Ordering::Relaxed) > 0);
    let after = fs::metadata(&victim).unwrap();
    assert_eq!(after.permissions(), before.permissions());
    assert_eq!((after.uid(), after.gid()), (before.uid(), before.gid()));
    assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
}

#[test]
fn the_socket_has_the_given_mode_and_group_and_no_directory_remains() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let gid = match rustix::process::geteuid().is_root() {
        true => Gid::from_raw(65534),
        false => rustix::process::getegid(),
    };
    let options = SocketFileOptions {
        mode: Some(Mode::from_raw_mode(0o621)),
        gid: Some(gid),
        ..OPTIONS
    };
    let (_socket, file) = bind(&path, options).unwrap();
    let made = fs::symlink_metadata(&path).unwrap();
    assert_eq!(made.permissions().mode() & 0o7777, 0o621);
    assert_eq!(made.gid(), gid.as_raw());
    assert_eq!(entries(directory.path()), [PathBuf::from("s")]);
    UnixStream::connect(&path).unwrap();
    drop(file);
    assert!(entries(directory.path()).is_empty());
}

#[test]
fn a_name_longer_than_a_socket_address_allows_behind_the_directory_is_bound() {
    let directory = tempfile::tempdir().unwrap();
    for length in [LONGEST_NAME, LONGEST_NAME + 1, 255] {
        let path = directory.path().join("x".repeat(length));
        let (_socket, _file) = bind(&path, OPTIONS).unwrap();
        let made = fs::symlink_metadata(&path).unwrap();
        assert!(made.file_type().is_socket());
    }
    assert!(entries(directory.path()).is_empty());
}

#[test]
fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    let (_socket, file) = bind(&path, OPTIONS).unwrap();
    assert!(matches!(bind(&path, OPTIONS), Err(BindError::InUse)));
    UnixStream::connect(&path).unwrap();
    assert_eq!(entries(directory.path()), [PathBuf::from("s")]);
    // Bound and not listening is held as well.
    let other = directory.path().join("t");
    let kind = SocketType::STREAM;
    let socket = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&other).unwrap()).unwrap();
    assert!(matches!(bind(&other, OPTIONS), Err(BindError::InUse)));
    drop(file);
    assert_eq!(entries(directory.path()), [PathBuf::from("t")]);
}

#[test]
fn a_file_created_at_the_path_after_the_probe_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    let (parent, name) = open_parent(&path).unwrap();
    let Found::Dead(dead) = probe(&parent, &name).unwrap() else {
        panic!("there is a dead socket");
    };
    let mut private = PrivateDirectory::make(&parent, &name).unwrap();
    let _socket = private.bind(SocketType::STREAM).unwrap();
    let precious = directory.path().join("precious");
    fs::write(&precious, "kept").unwrap();
    fs::rename(&precious, &path).unwrap();
    assert!(!private.replace(&parent, &name, dead).unwrap());
    assert!(!private.move_to(&parent, &name).unwrap());
    assert!(matches!(probe(&parent, &name), Err(BindError::NotASocket)));
    drop(private);
    assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
    assert_eq!(entries(directory.path()), [PathBuf::from("s")]);
}

#[test]
fn what_cannot_be_examined_after_the_exchange_is_put_back() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    let before = fs::symlink_metadata(&path).unwrap();
    let (parent, name) = open_parent(&path).unwrap();
    let Found::Dead(dead) = probe(&parent, &name).unwrap() else {
        panic!("there is a dead socket");
    };
    let mut private = PrivateDirectory::make(&parent, &name).unwrap();
    let socket = private.bind(SocketType::STREAM).unwrap();
    // Large enough for all other tests, small enough to be filled.
    let limit = getrlimit(Resource::Nofile);
    let current = Some(limit.current.map_or(4096, |current| current.min(4096)));
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    let replace = || {
        // SAFETY: the thread has a copy of the table of descriptors, and no descriptor that it
        // makes is passed to another thread.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES) }.unwrap();
        let _filling: Vec<_> = std::iter::from_fn(|| socket.try_clone().ok()).collect();
        private.replace(&parent, &name, dead).unwrap_err()
    };
    let error = std::thread::scope(|scope| scope.spawn(replace).join().unwrap());
    assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
    drop(private);
    let after = fs::symlink_metadata(&path).unwrap();
    assert_eq!(after.ino(), before.ino());
    assert_eq!(entries(directory.path()), [PathBuf::from("s")]);
}

#[test]
fn the_file_is_removed_under_the_lock_of_the_directory_or_after_the_wait_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, file) = bind(&path, OPTIONS).unwrap();
    let (parent, _) = open_parent(&path).unwrap();
    let held = lock(&parent, OPTIONS.lock_wait).unwrap();
    let start = Instant::now();
    drop(file);
    assert!(start.elapsed() >= DROP_WAIT);
    assert!(entries(directory.path()).is_empty());
    drop(held);
}

#[test]
fn a_directory_that_other_users_may_enter_is_not_taken_for_ours() {
    let directory = tempfile::tempdir().unwrap();
    let (parent, name) = open_parent(&directory.path().join("s")).unwrap();
    let made = PrivateDirectory::make(&parent, &name).unwrap();
    let place = directory.path().join(&made.name);
    fs::set_permissions(&place, fs::Permissions::from_mode(0o710)).unwrap();
    assert!(check_private(&made.fd).is_err());
    fs::set_permissions(&place, fs::Permissions::from_mode(0o700)).unwrap();
    check_private(&made.fd).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&place, Some(65534), None).unwrap();
        assert!(check_private(&made.fd).is_err());
    }
    drop(made);
    assert!(!place.exists());
}

/// A file system gives the inode of a removed file to the next one.
#[test]
fn a_socket_with_the_inode_of_a_removed_one_stays_reserved() {
    let place = (u32::MAX, u32::MAX, 1);
    let (old, new) = (Reservation::new(place), Reservation::new(place));
    drop(old);
    assert!(reserved().contains_key(&place));
    drop(new);
    assert!(!reserved().contains_key(&place));
}
