//! Opening a file by its path, step by step, without a call into a file system that another user serves.
//!
//! # Invariants
//! - Each component is opened with O_PATH and O_NOFOLLOW in the directory before it, and its mount is
//!   checked before anything is looked up in it. The root of a mount is opened without its server.
//! - A symbolic link is followed only if root or our user owns it, and no other user can write to its
//!   directory.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxFlags, openat, readlinkat, statx,
};
use rustix::io::Errno;

use crate::mounts::{self, MountClass, is_trusted_user};

/// Symbolic links that are followed in one path, as the kernel does.
const MAX_LINKS: usize = 40;

/// A file that was opened by its path.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Opened with O_PATH.
    pub(crate) file: OwnedFd,
    pub(crate) status: Statx,
    mount: u64,
    class: MountClass,
}

impl Entry {
    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.status.stx_mode.into())
    }

    /// Whether users other than root and ours can change what is in this directory.
    fn is_writable_by_others(&self) -> bool {
        let mode = Mode::from_raw_mode(self.status.stx_mode.into());
        mode.intersects(Mode::WGRP | Mode::WOTH) || !is_trusted_user(self.status.stx_uid)
    }
}

/// Opens the file at `path`. It can take as long as the file systems on the way that root has mounted.
///
/// # Errors
/// `PermissionDenied` where the path leads through a link or mount of another user; those of openat(2). The
/// text names the component.
pub(crate) fn open(path: &Path) -> io::Result<Entry> {
    let mut walk = Walk::default();
    let mut entry = walk.begin_at(path)?;
    walk.go(&mut entry)?;
    Ok(entry)
}

/// Where a path leads, and by which links.
#[derive(Debug)]
pub(crate) struct Traced {
    /// The path without links.
    pub(crate) path: PathBuf,
    pub(crate) entry: Entry,
    /// The links on the way, as paths without links, with their texts.
    pub(crate) links: Vec<(PathBuf, PathBuf)>,
}

/// As [`open`], of an absolute path. Where the path leads through a link or mount of another user, the directory
/// before that.
///
/// # Errors
/// Those of openat(2).
pub(crate) fn trace(path: &Path) -> io::Result<Traced> {
    let mut walk = Walk::default();
    let mut entry = walk.begin_at(path)?;
    match walk.go(&mut entry) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => drop(walk.at.pop()),
        other => other?,
    }
    Ok(Traced {
        path: walk.at,
        entry,
        links: walk.followed,
    })
}

/// As [`open`], a directory.
///
/// # Errors
/// As [`open`]; `NotADirectory`.
pub(crate) fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let entry = open(path)?;
    match entry.kind() {
        FileType::Directory => Ok(entry.file),
        _ => Err(fail(io::ErrorKind::NotADirectory, path, "is no directory")),
    }
}

fn fail(kind: io::ErrorKind, at: &Path, text: &str) -> io::Error {
    io::Error::new(kind, format!("{}: {text}", at.display()))
}

#[derive(Default)]
struct Walk {
    /// Components still to be opened, the next one last.
    rest: Vec<OsString>,
    /// The path so far, for errors.
    at: PathBuf,
    /// The links that were followed, with their texts.
    followed: Vec<(PathBuf, PathBuf)>,
}

impl Walk {
    /// Takes a path in, and opens the directory in which it begins.
    fn begin_at(&mut self, path: &Path) -> io::Result<Entry> {
        if path.as_os_str().is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        match self.begin(path)? {
            Some(root) => Ok(root),
            None => self.start(Path::new(".")),
        }
    }

    /// Goes on from a directory to the end of the path. After an error, `directory` is that of the component which
    /// is not opened.
    fn go(&mut self, directory: &mut Entry) -> io::Result<()> {
        while let Some(name) = self.rest.pop() {
            match name == ".." && self.at.file_name().is_some() {
                true => drop(self.at.pop()),
                false => self.at.push(&name),
            }
            if let Some(next) = self.next(directory, &name)? {
                *directory = next;
            }
        }
        Ok(())
    }

    /// Takes the components of a path in, and opens the root if it begins there.
    fn begin(&mut self, path: &Path) -> io::Result<Option<Entry>> {
        let mut components = path.components().peekable();
        let root = components.next_if_eq(&Component::RootDir);
        if let Some(root) = root {
            self.at = PathBuf::from(root.as_os_str());
        }
        let names = components.filter(|it| *it != Component::CurDir);
        let names: Vec<_> = names.map(|it| it.as_os_str().to_owned()).collect();
        self.rest.extend(names.into_iter().rev());
        root.map(|_| self.start(Path::new("/"))).transpose()
    }

    fn start(&self, directory: &Path) -> io::Result<Entry> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        self.examine(openat(CWD, directory, flags, Mode::empty()), None)
    }

    /// Opens the next entry of a directory, or what it leads to; `None`: the walk goes on in the directory.
    fn next(&mut self, directory: &Entry, name: &OsStr) -> io::Result<Option<Entry>> {
        let entry = self.step(directory, name)?;
        match entry.kind() {
            FileType::Symlink => self.follow(directory, &entry, name),
            _ => Ok(Some(entry)),
        }
    }

    /// Opens an entry of a directory.
    fn step(&self, directory: &Entry, name: &OsStr) -> io::Result<Entry> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = |flags| openat(&directory.file, name, flags, Mode::empty());
        let opened = match self.rest.is_empty() {
            true => open(flags),
            // Asked for a directory, the kernel mounts what autofs has there.
            false => match open(flags | OFlags::DIRECTORY) {
                Err(Errno::NOTDIR) => open(flags),
                other => other,
            },
        };
        let entry = self.examine(opened, Some(directory))?;
        match entry.kind() {
            FileType::Directory | FileType::Symlink => Ok(entry),
            _ if self.rest.is_empty() => Ok(entry),
            _ => Err(fail(
                io::ErrorKind::NotADirectory,
                &self.at,
                "is no directory",
            )),
        }
    }

    /// Checks an entry and its mount before it is used.
    fn examine(
        &self,
        opened: Result<OwnedFd, Errno>,
        directory: Option<&Entry>,
    ) -> io::Result<Entry> {
        let named = |error: io::Error| fail(error.kind(), &self.at, &error.to_string());
        let file = opened.map_err(|errno| named(errno.into()))?;
        // Answered without asking the file system's server.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
        let status = statx(&file, "", flags, wanted).map_err(|errno| named(errno.into()))?;
        let mount = mounts::mount_of(&file, &status).map_err(named)?;
        let class = match directory {
            Some(directory) if directory.mount == mount => directory.class,
            _ => mounts::class(mount).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => {
                    let text = "is on a file system that this process does not see mounted";
                    fail(io::ErrorKind::PermissionDenied, &self.at, text)
                }
                _ => named(error),
            })?,
        };
        if let MountClass::ServedByOther(user) = class {
            let text = format!(
                "a file system of user {user} (FUSE) is mounted here; its server could make zerosock wait"
            );
            return Err(fail(io::ErrorKind::PermissionDenied, &self.at, &text));
        }
        Ok(Entry {
            file,
            status,
            mount,
            class,
        })
    }

    /// Takes in where a link leads. Returns the directory in which its path begins, if that is another one.
    fn follow(
        &mut self,
        directory: &Entry,
        link: &Entry,
        name: &OsStr,
    ) -> io::Result<Option<Entry>> {
        let refuse = |text: &str| Err(fail(io::ErrorKind::PermissionDenied, &self.at, text));
        let owner = link.status.stx_uid;
        if !is_trusted_user(owner) {
            return refuse(&format!("a symbolic link of user {owner} is not followed"));
        }
        // Those of procfs are the kernel's.
        if link.class == MountClass::Proc {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let opened = openat(&directory.file, name, flags, Mode::empty());
            return self.examine(opened, None).map(Some);
        }
        if directory.is_writable_by_others() {
            return refuse(
                "a symbolic link in a directory that other users can write to is not followed",
            );
        }
        if self.followed.len() >= MAX_LINKS {
            let error = io::Error::from(Errno::LOOP);
            return Err(fail(error.kind(), &self.at, &error.to_string()));
        }
        let target = readlinkat(&link.file, "", Vec::new())?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        self.followed.push((self.at.clone(), target.clone()));
        self.at.pop();
        self.begin(&target)
    }
}
