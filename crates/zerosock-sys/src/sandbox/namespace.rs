//! A mount namespace that holds given paths only.
//!
//! The new root is a tmpfs with the directories and links that lead to them. It is made by the calls of Linux 5.2
//! that mount by descriptor: the sources are cloned first, since the new root hides what it is mounted on.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::{env, fs, io};

use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat, symlinkat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    mount_change, mount_remount, move_mount, open_tree, unmount,
};
use rustix::process::{fchdir, pivot_root};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::files::Files;
use crate::mounts;

/// Links on the way to a path.
const MAX_LINKS: usize = 40;

/// A mount that is copied into the namespace.
struct Copy {
    at: PathBuf,
    tree: OwnedFd,
    is_directory: bool,
    flags: MountFlags,
}

/// Leaves the calling thread in a namespace with these files and /proc. The calls that look for the mounts of other
/// processes see those of the former namespace.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN; those of mounting.
pub(super) fn enter(files: &Files) -> io::Result<()> {
    mounts::keep_list()?;
    let here = env::current_dir().unwrap_or_else(|_| "/".into());
    // SAFETY: the caller has one thread, so no other one uses the file system context that is unshared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS)? };
    // Mounts and unmounts of the host appear here, and none of these there.
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", slave)?;
    let mut layout = Layout::default();
    layout.directories.insert(here.clone());
    let mut copies = Vec::new();
    let kinds = [
        (&files.write, MountFlags::NODEV),
        (&files.devices, MountFlags::empty()),
        (&files.read, MountFlags::NODEV | MountFlags::RDONLY),
    ];
    for (paths, flags) in kinds {
        for path in paths {
            // What does not exist is not there in the namespace either.
            let Ok(real) = layout.add(path, 0) else {
                continue;
            };
            let covers = |copy: &Copy| real.starts_with(&copy.at) && copy.flags == flags;
            if !copies
                .iter()
                .any(|copy: &Copy| copy.at == real || covers(copy))
            {
                copies.push(clone(&real, flags)?);
            }
        }
    }
    copies.sort_by_key(|copy| copy.at.components().count());
    let proc = new_proc().or_else(|_| clone(Path::new("/proc"), MountFlags::empty()))?;
    let root = new_tmpfs()?;
    move_mount(
        &root,
        "",
        CWD,
        "/proc",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )?;
    let filled = layout
        .make(&root)
        .and_then(|()| attach(&root, &proc, &copies));
    // What failed leaves the former root, which shows /proc again.
    if filled.is_err() {
        unmount("/proc", UnmountFlags::DETACH)?;
    }
    filled?;
    env::set_current_dir(&here)?;
    let common = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NOEXEC;
    for copy in &copies {
        mount_remount(&copy.at, common | copy.flags, "")?;
    }
    Ok(mount_remount(
        "/",
        common | MountFlags::NODEV | MountFlags::RDONLY,
        "",
    )?)
}

/// Puts the mounts into the new root, and makes it the root.
fn attach(root: &OwnedFd, proc: &Copy, copies: &[Copy]) -> io::Result<()> {
    for copy in [proc].into_iter().chain(copies) {
        let at = copy.at.strip_prefix("/").unwrap_or(&copy.at);
        make_place(root, at, copy.is_directory)?;
        let empty_path = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&copy.tree, "", root, at, empty_path)?;
    }
    fchdir(root)?;
    pivot_root(".", ".")?;
    Ok(unmount(".", UnmountFlags::DETACH)?)
}

fn clone(at: &Path, flags: MountFlags) -> io::Result<Copy> {
    let how = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    Ok(Copy {
        tree: open_tree(CWD, at, how)?,
        is_directory: fs::metadata(at)?.is_dir(),
        at: at.to_owned(),
        flags,
    })
}

/// An instance of procfs that shows the processes alone that this one may trace.
fn new_proc() -> io::Result<Copy> {
    let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("hidepid", "ptraceable"), ("subset", "pid")] {
        fsconfig_set_string(context.as_fd(), key, value)?;
    }
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(Copy {
        tree: fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?,
        is_directory: true,
        at: "/proc".into(),
        flags: MountFlags::empty(),
    })
}

fn new_tmpfs() -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), "mode", "0755")?;
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes,
    )?)
}

/// Directories and links of the new root.
#[derive(Default)]
struct Layout {
    directories: BTreeSet<PathBuf>,
    links: BTreeSet<(PathBuf, PathBuf)>,
}

impl Layout {
    /// Adds the links on the way to `path`, and returns where it leads.
    fn add(&mut self, path: &Path, links: usize) -> io::Result<PathBuf> {
        if links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        let path = std::path::absolute(path)?;
        let mut real = PathBuf::from("/");
        let mut rest = path.components();
        while let Some(component) = rest.next() {
            match component {
                Component::ParentDir => drop(real.pop()),
                Component::Normal(name) => {
                    let next = real.join(name);
                    if !fs::symlink_metadata(&next)?.is_symlink() {
                        real = next;
                        continue;
                    }
                    let target = fs::read_link(&next)?;
                    self.directories.insert(real.clone());
                    self.links.insert((next, target.clone()));
                    return self.add(&real.join(target).join(rest.as_path()), links + 1);
                }
                _ => {}
            }
        }
        Ok(real)
    }

    fn make(&self, root: &OwnedFd) -> io::Result<()> {
        for directory in &self.directories {
            make_directories(root, directory.strip_prefix("/").unwrap_or(directory))?;
        }
        for (link, target) in &self.links {
            symlinkat(target, root, link.strip_prefix("/").unwrap_or(link))?;
        }
        Ok(())
    }
}

/// Makes what a mount goes on, unless an outer mount has it.
fn make_place(root: &OwnedFd, at: &Path, is_directory: bool) -> io::Result<()> {
    if is_directory {
        return make_directories(root, at);
    }
    make_directories(root, at.parent().unwrap_or(Path::new("")))?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    if openat(root, at, flags, Mode::empty()).is_err() {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat(root, at, flags, Mode::RUSR)?;
    }
    Ok(())
}

fn make_directories(root: &OwnedFd, path: &Path) -> io::Result<()> {
    let mut at = PathBuf::new();
    for name in path.iter().filter(|name| *name != OsStr::new("/")) {
        at.push(name);
        match mkdirat(root, &at, Mode::from_raw_mode(0o755)) {
            // A read-only mount that lacks it.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
