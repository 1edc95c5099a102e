//! Unix sockets with a path, made so that no other user can redirect a change of mode or owner.
//!
//! `chmod` and `chown` of the path that was just bound follow a symbolic link that another user
//! puts in its place. So [`bind`] makes the socket in a private directory (mode 0700) beside the
//! target, sets its group and mode there, and renames it to the target path.
//!
//! # Invariants
//! - No call follows a symbolic link at the target path, and none follows one inside the private
//!   directory, which other users cannot enter.
//! - A socket that a live process holds is left alone, and so is everything that is not a socket.
//!   Only a dead socket is replaced.
//! - No call asks the server of a file system that another user has mounted on the way to the target, at
//!   the target path, or in the place of the private directory: such a mount is refused, and so is a
//!   symbolic link of another user on the way (`walk`).
//! - [`SocketFile`] removes its file only while device, inode and time of birth are unchanged.
//!
//! The kernel reports the socket's address as `/proc/self/fd/N/NAME`: it is the path by which the
//! socket was bound, and a rename does not change it.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, FileType, FlockOperation, Gid, Mode, OFlags, RenameFlags, Statx, StatxAttributes,
    StatxFlags,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::fd_passing;
use crate::socket_path::walk;

/// What [`bind`] makes.
#[derive(Clone, Copy, Debug)]
pub struct SocketFileOptions {
    /// SOCK_STREAM or SOCK_SEQPACKET, which listen, or SOCK_DGRAM, which does not.
    pub kind: SocketType,
    /// Permission bits; `None`: 0600, or 0660 with a group. The umask has no effect.
    pub mode: Option<Mode>,
    /// The owning group; `None` leaves it to the kernel.
    pub gid: Option<Gid>,
    /// Connections that may wait to be accepted.
    pub backlog: i32,
    /// Programs that connect cannot send descriptors, where the kernel can refuse them
    /// ([`refuse_rights`](crate::fd_passing::refuse_rights)).
    pub refuse_rights: bool,
    /// It is for VMMs, for processes that attach, or for host programs: what this process connects to for
    /// a guest or by a relay is never this socket ([`socket_path`](crate::socket_path)).
    pub reserved: bool,
    /// How long to wait for another process that binds a socket in the same directory.
    pub lock_wait: Duration,
}

/// Why [`bind`] made no socket.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// A live process holds a socket at the path.
    #[error("in use by a live process")]
    InUse,
    /// The path exists and is not a socket.
    #[error("exists and is not a socket")]
    NotASocket,
    /// It is not known whether the socket at the path is held.
    #[error("cannot find out whether the socket there is in use: {0}")]
    Unprobed(io::Error),
    /// The group cannot be set.
    #[error("cannot set the group: {0}")]
    Group(io::Error),
    /// The mode cannot be set.
    #[error("cannot set the mode: {0}")]
    Mode(io::Error),
    /// Any other call has failed.
    #[error("cannot be made: {0}")]
    Make(io::Error),
}

impl From<BindError> for io::Error {
    fn from(error: BindError) -> io::Error {
        let kind = match &error {
            BindError::InUse | BindError::NotASocket => io::ErrorKind::AddrInUse,
            BindError::Unprobed(e)
            | BindError::Group(e)
            | BindError::Mode(e)
            | BindError::Make(e) => e.kind(),
        };
        io::Error::new(kind, error)
    }
}

fn make(error: impl Into<io::Error>) -> BindError {
    BindError::Make(error.into())
}

/// A socket file made by [`bind`]. Dropping it removes the file, unless another has replaced it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: Identity,
    _reservation: Option<Reservation>,
    lock_wait: Duration,
}

/// Longest wait for the lock when a [`SocketFile`] is dropped: a process may drop many.
const DROP_WAIT: Duration = Duration::from_millis(100);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // When any of this fails, the next owner of the path replaces the dead socket.
        let Ok((directory, name)) = open_parent(&self.path) else {
            return;
        };
        // No other process replaces the file between the comparison and the removal.
        let _lock = lock(&directory, self.lock_wait.min(DROP_WAIT));
        let found = open_entry(&directory, &name).and_then(|file| Identity::of(&file));
        if found.is_ok_and(|(now, _)| now == self.identity) {
            let _ = rustix::fs::unlinkat(&directory, &*name, AtFlags::empty());
        }
    }
}

/// Tells a file from its successor at the same path. Inode numbers are reused at once; the time of
/// birth differs then, on file systems that keep it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Identity {
    device: (u32, u32),
    inode: u64,
    /// Seconds and nanoseconds.
    born: Option<(i64, u32)>,
}

impl Identity {
    fn id(&self) -> FileId {
        let (major, minor) = self.device;
        (major, minor, self.inode)
    }

    /// Of an open file, and whether it is a socket.
    fn of(file: &OwnedFd) -> io::Result<(Identity, bool)> {
        let found = examine(file)?;
        let has_birth = found.stx_mask & StatxFlags::BTIME.bits() != 0;
        let identity = Identity {
            device: (found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            born: has_birth.then_some((found.stx_btime.tv_sec, found.stx_btime.tv_nsec)),
        };
        let kind = FileType::from_raw_mode(found.stx_mode.into());
        Ok((identity, kind == FileType::Socket))
    }
}

impl SocketFile {
    /// The file at a path, which a predecessor of this process has made for a socket that this one has.
    /// `reserved` as in [`SocketFileOptions`].
    ///
    /// # Errors
    /// There is no socket at the path.
    pub fn adopt(path: &Path, reserved: bool, lock_wait: Duration) -> io::Result<SocketFile> {
        let (directory, name) = open_parent(path)?;
        let (identity, is_socket) = Identity::of(&open_entry(&directory, &name)?)?;
        if !is_socket {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(SocketFile {
            path: path.to_owned(),
            identity,
            _reservation: reserved.then(|| Reservation::new(identity.id())),
            lock_wait,
        })
    }
}

/// Device and inode of a file.
type FileId = (u32, u32, u64);

pub(crate) fn device_and_inode(status: &Statx) -> FileId {
    (status.stx_dev_major, status.stx_dev_minor, status.stx_ino)
}

/// The sockets of this process that were made with [`SocketFileOptions::reserved`], and how many reservations each has:
/// a file system gives the inode of a removed file to a new one while the [`SocketFile`] of the old one
/// still exists.
static RESERVED: LazyLock<Mutex<HashMap<FileId, usize>>> = LazyLock::new(Mutex::default);

fn reserved() -> MutexGuard<'static, HashMap<FileId, usize>> {
    // Nothing that can panic happens between two changes.
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reserves a socket until it is dropped.
#[derive(Debug)]
struct Reservation(FileId);

impl Reservation {
    fn new(id: FileId) -> Reservation {
        *reserved().entry(id).or_default() += 1;
        Reservation(id)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut all = reserved();
        if let Some(count) = all.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.0);
            }
        }
    }
}

pub(crate) fn is_reserved(status: &Statx) -> bool {
    reserved().contains_key(&device_and_inode(status))
}

/// Reserves the socket at a path, which another process has made for this one, until this process ends.
///
/// # Errors
/// The path does not lead to a file.
pub fn reserve(path: &Path) -> io::Result<()> {
    let entry = walk::open(path)?;
    // Its count never falls to 0.
    std::mem::forget(Reservation::new(device_and_inode(&entry.status)));
    Ok(())
}

/// What the kernel knows of a file, without asking the file system's server, which may be a process of
/// another user (FUSE). What is mounted at the file's path is refused, where the kernel can tell (Linux
/// 5.8): it cannot be replaced.
fn examine(file: &OwnedFd) -> io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let found = rustix::fs::statx(file, "", flags, mask)?;
    if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        let text = "something is mounted at this path";
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
    }
    Ok(found)
}

/// Times that the path may change between the probe and the rename.
const ATTEMPTS: usize = 16;

/// Listens on a path. A dead socket there is replaced; anything else is left alone and refused.
///
/// The socket listens, and its mode and group are set, before it appears at the path.
///
/// # Errors
/// [`BindError`]; nothing has changed at the path.
pub fn bind(path: &Path, options: SocketFileOptions) -> Result<(OwnedFd, SocketFile), BindError> {
    let (directory, name) = open_parent(path).map_err(make)?;
    // Of two processes that find the same dead socket, the second has to see the first one's.
    let _lock = lock(&directory, options.lock_wait);
    // Before the work, so that the usual refusals are cheap.
    probe(&directory, &name)?;
    let mut private = PrivateDirectory::make(&directory, &name).map_err(make)?;
    let socket = private.bind(options.kind).map_err(make)?;
    private.set_access(options.mode, options.gid)?;
    let made = open_entry(&private.fd, &private.entry).map_err(make)?;
    let (identity, _) = Identity::of(&made).map_err(make)?;
    // Before it can be found.
    let reservation = options.reserved.then(|| Reservation::new(identity.id()));
    if options.refuse_rights {
        fd_passing::refuse_rights(&socket).map_err(make)?;
    }
    if options.kind != SocketType::DGRAM {
        rustix::net::listen(&socket, options.backlog).map_err(make)?;
    }
    for _ in 0..ATTEMPTS {
        let moved = match probe(&directory, &name)? {
            Found::Nothing => private.move_to(&directory, &name),
            Found::Dead(dead) => private.replace(&directory, &name, dead),
        };
        match moved {
            Ok(true) => {
                let file = SocketFile {
                    path: path.to_path_buf(),
                    identity,
                    _reservation: reservation,
                    lock_wait: options.lock_wait,
                };
                return Ok((socket, file));
            }
            // Something else has come to the path since the probe.
            Ok(false) => {}
            Err(error) => return Err(make(error)),
        }
    }
    Err(BindError::InUse)
}

/// What is at the target path, if [`bind`] may proceed.
enum Found {
    Nothing,
    /// A socket that no process holds.
    Dead(Identity),
}

fn probe(directory: &OwnedFd, name: &Path) -> Result<Found, BindError> {
    let file = match open_entry(directory, name) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => return Err(make(error)),
    };
    let (identity, is_socket) = Identity::of(&file).map_err(make)?;
    if !is_socket {
        return Err(BindError::NotASocket);
    }
    match is_held(&file) {
        Ok(true) => Err(BindError::InUse),
        Ok(false) => Ok(Found::Dead(identity)),
        Err(error) => Err(BindError::Unprobed(error)),
    }
}

/// Whether some process holds the socket of this file. A dead socket stays dead: no socket can be
/// bound to an existing file.
///
/// The probe connects with a socket of another type, which the kernel refuses with EPROTOTYPE if
/// the socket is held, and with ECONNREFUSED if not. So a listener never sees a connection: a
/// vhost-user device takes only one at a time.
fn is_held(file: &OwnedFd) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    let address = SocketAddrUnix::new(by_descriptor(file.as_fd(), None))?;
    match rustix::net::connect(&probe, &address) {
        Ok(()) | Err(Errno::PROTOTYPE) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// A directory that only this user can enter, beside the target. Removed when dropped.
struct PrivateDirectory<'a> {
    parent: &'a OwnedFd,
    name: PathBuf,
    fd: OwnedFd,
    /// The name of the socket in it.
    entry: PathBuf,
    /// `entry` is a file that may be removed.
    filled: bool,
}

/// Longest name that, behind `/proc/self/fd/N/`, still fits in a socket address.
const LONGEST_NAME: usize = 80;

impl<'a> PrivateDirectory<'a> {
    /// Makes one for a socket that will have this name.
    fn make(parent: &'a OwnedFd, target: &Path) -> io::Result<PrivateDirectory<'a>> {
        let name = loop {
            let name = PathBuf::from(format!(".zerosock-{:016x}", random()));
            match rustix::fs::mkdirat(parent, &name, Mode::RWXU) {
                Ok(()) => break name,
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(parent, &name, flags, Mode::empty());
        let short = target.as_os_str().len() <= LONGEST_NAME;
        let directory = PrivateDirectory {
            parent,
            name,
            fd: opened?,
            // The target's own name, because tools such as ss(8) show it.
            entry: if short { target } else { Path::new("socket") }.to_path_buf(),
            filled: false,
        };
        check_private(&directory.fd)?;
        Ok(directory)
    }

    fn bind(&mut self, kind: SocketType) -> io::Result<OwnedFd> {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        let path = by_descriptor(self.fd.as_fd(), Some(&self.entry));
        match rustix::net::bind(&socket, &SocketAddrUnix::new(path)?) {
            // The directory itself is open.
            Err(Errno::NOENT) => {
                let text = "/proc is not mounted; a socket cannot be made safely without it";
                Err(io::Error::new(io::ErrorKind::NotFound, text))
            }
            Err(errno) => Err(errno.into()),
            Ok(()) => {
                self.filled = true;
                Ok(socket)
            }
        }
    }

    fn set_access(&self, mode: Option<Mode>, gid: Option<Gid>) -> Result<(), BindError> {
        if gid.is_some() {
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            rustix::fs::chownat(&self.fd, &self.entry, None, gid, flags)
                .map_err(|errno| BindError::Group(errno.into()))?;
        }
        let group = match gid {
            Some(_) => Mode::RGRP | Mode::WGRP,
            None => Mode::empty(),
        };
        let mode = mode.unwrap_or(Mode::RUSR | Mode::WUSR | group);
        rustix::fs::chmodat(&self.fd, &self.entry, mode, AtFlags::empty())
            .map_err(|errno| BindError::Mode(errno.into()))
    }

    /// Moves the socket to the target path, at which there was nothing. False: there is now.
    fn move_to(&mut self, to: &OwnedFd, name: &Path) -> io::Result<bool> {
        match self.rename(to, name, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => return Ok(false),
            // The file system has no such rename; it was looked at just now.
            Err(Errno::INVAL) => self.rename(to, name, RenameFlags::empty())?,
            other => other?,
        }
        self.filled = false;
        Ok(true)
    }

    /// Moves the socket to the target path and removes the dead one there. False: something else
    /// is there, and still is. It also is after an error.
    fn replace(&mut self, to: &OwnedFd, name: &Path, dead: Identity) -> io::Result<bool> {
        match self.rename(to, name, RenameFlags::EXCHANGE) {
            Err(Errno::NOENT) => return Ok(false),
            Err(Errno::INVAL) => {
                self.rename(to, name, RenameFlags::empty())?;
                self.filled = false;
                return Ok(true);
            }
            other => other?,
        }
        // From here on the entry is what was at the path.
        self.filled = false;
        let found = open_entry(&self.fd, &self.entry).and_then(|file| Identity::of(&file));
        let is_dead = found.map(|(found, _)| found == dead);
        if !matches!(is_dead, Ok(true)) {
            self.rename(to, name, RenameFlags::EXCHANGE)?;
        }
        self.filled = true;
        is_dead
    }

    fn rename(&self, to: &OwnedFd, name: &Path, flags: RenameFlags) -> Result<(), Errno> {
        rustix::fs::renameat_with(&self.fd, &self.entry, to, name, flags)
    }
}

impl Drop for PrivateDirectory<'_> {
    fn drop(&mut self) {
        if self.filled {
            let _ = rustix::fs::unlinkat(&self.fd, &self.entry, AtFlags::empty());
        }
        let _ = rustix::fs::unlinkat(self.parent, &self.name, AtFlags::REMOVEDIR);
    }
}

/// Refuses a directory that the owner of its parent directory has put in the place of ours.
fn check_private(directory: &OwnedFd) -> io::Result<()> {
    let found = examine(directory)?;
    let ours = rustix::process::geteuid().as_raw();
    if found.stx_uid != ours || found.stx_mode & 0o077 != 0 {
        let text = "another user has replaced the private directory beside the socket";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(())
}

/// The path of an open file, or of an entry of an open directory, that no rename changes.
fn by_descriptor(fd: BorrowedFd<'_>, entry: Option<&Path>) -> PathBuf {
    let mut path = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    path.extend(entry);
    path
}

/// The directory of a path, opened, and the last component.
fn open_parent(path: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let Some(name) = path.file_name() else {
        let text = "the path does not end in the name of a file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    };
    if path.as_os_str().as_bytes().last() == Some(&b'/') {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let directory = walk::open_directory(parent)?;
    Ok((directory, PathBuf::from(name)))
}

/// What is at this name, itself and not what it links to. Opening it so has no side effect.
fn open_entry(directory: &OwnedFd, name: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?)
}

/// Excludes other processes that bind sockets in the directory, until dropped.
///
/// Any user with read permission for the directory can hold this lock, so the wait is short and the caller
/// goes on without: the lock guards against an accident, not against an attack.
fn lock(directory: &OwnedFd, wait: Duration) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(directory, ".", flags, Mode::empty()).ok()?;
    let deadline = Instant::now() + wait;
    loop {
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(directory),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(_) => return None,
        }
    }
}

/// A number that another user does not guess.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

#[cfg(test)]
#[path = "socket_file_tests.rs"]
mod tests;
