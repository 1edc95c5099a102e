//! A mount namespace that holds given paths only.
//!
//! The new root is a tmpfs with the directories and links that lead to them. It is made by the calls of Linux 5.2
//! that mount by descriptor: the sources are cloned first, since the new root hides what it is mounted on.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::{env, io};

use rustix::fs::{CWD, FileType, Mode, OFlags, mkdirat, openat, symlinkat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    mount_change, mount_remount, move_mount, open_tree, unmount,
};
use rustix::process::{fchdir, pivot_root};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::place::{Place, Use};
use crate::mounts;

/// A mount that is copied into the namespace.
struct Copy {
    at: PathBuf,
    tree: OwnedFd,
    is_directory: bool,
    flags: MountFlags,
}

/// Leaves the calling thread in a copy of its namespace. The calls that look for the mounts of other processes see
/// those of the former one.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN; those of mounting.
pub(super) fn leave() -> io::Result<()> {
    mounts::keep_list()?;
    // SAFETY: the caller has one thread, so no other one uses the file system context that is unshared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS)? };
    // Mounts and unmounts of the host appear here, and none of these there.
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    Ok(mount_change("/", slave)?)
}

/// Empties the namespace but for these places, which were found in it, and /proc.
///
/// # Errors
/// Those of mounting.
pub(super) fn empty(places: &[Place]) -> io::Result<()> {
    let here = env::current_dir().unwrap_or_else(|_| "/".into());
    let (mut directories, mut links) = (BTreeSet::from([here.clone()]), BTreeSet::new());
    let mut copies: Vec<Copy> = Vec::new();
    for Place { used_for, traced } in places {
        for (link, target) in &traced.links {
            directories.extend(link.parent().map(Path::to_owned));
            links.insert((link.clone(), target.clone()));
        }
        let flags = match used_for {
            Use::Write => MountFlags::NODEV,
            Use::Device => MountFlags::empty(),
            Use::Read => MountFlags::NODEV | MountFlags::RDONLY,
        };
        let at = &traced.path;
        let has = |copy: &Copy| copy.at == *at || (copy.flags == flags && at.starts_with(&copy.at));
        if !copies.iter().any(has) {
            copies.push(Copy {
                tree: clone(&traced.entry.file)?,
                is_directory: traced.entry.kind() == FileType::Directory,
                at: at.clone(),
                flags,
            });
        }
    }
    copies.sort_by_key(|copy| copy.at.components().count());
    let proc = new_proc().or_else(|_| clone(&File::open("/proc")?.into()))?;
    let root = new_tmpfs()?;
    move_mount(
        &root,
        "",
        CWD,
        "/proc",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )?;
    let filled = make_all(&root, &directories, &links).and_then(|()| attach(&root, &proc, &copies));
    // What failed leaves the former root, which shows /proc again.
    if filled.is_err() {
        unmount("/proc", UnmountFlags::DETACH)?;
    }
    filled?;
    mounts::forget();
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
fn attach(root: &OwnedFd, proc: &OwnedFd, copies: &[Copy]) -> io::Result<()> {
    let empty_path = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    make_directories(root, Path::new("proc"))?;
    move_mount(proc, "", root, "proc", empty_path)?;
    for (index, copy) in copies.iter().enumerate() {
        let at = copy.at.strip_prefix("/").unwrap_or(&copy.at);
        // In an outer mount, which others may write to, nothing is made: it is there, or was a moment ago.
        let mut outer = copies.iter().take(index);
        if !outer.any(|outer| copy.at.starts_with(&outer.at)) {
            make_place(root, at, copy.is_directory)?;
        }
        move_mount(&copy.tree, "", root, at, empty_path)?;
    }
    fchdir(root)?;
    pivot_root(".", ".")?;
    Ok(unmount(".", UnmountFlags::DETACH)?)
}

fn clone(file: &OwnedFd) -> io::Result<OwnedFd> {
    let how = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    Ok(open_tree(file, "", how)?)
}

/// An instance of procfs that shows the processes alone that this one may trace.
fn new_proc() -> io::Result<OwnedFd> {
    let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("hidepid", "ptraceable"), ("subset", "pid")] {
        fsconfig_set_string(context.as_fd(), key, value)?;
    }
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes,
    )?)
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

/// Makes the directories and links of the new root.
fn make_all(
    root: &OwnedFd,
    directories: &BTreeSet<PathBuf>,
    links: &BTreeSet<(PathBuf, PathBuf)>,
) -> io::Result<()> {
    for directory in directories {
        make_directories(root, directory.strip_prefix("/").unwrap_or(directory))?;
    }
    for (link, target) in links {
        symlinkat(target, root, link.strip_prefix("/").unwrap_or(link))?;
    }
    Ok(())
}

/// Makes what a mount goes on.
fn make_place(root: &OwnedFd, at: &Path, is_directory: bool) -> io::Result<()> {
    if is_directory {
        return make_directories(root, at);
    }
    make_directories(root, at.parent().unwrap_or(Path::new("")))?;
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(root, at, flags, Mode::RUSR).map(drop)?)
}

fn make_directories(root: &OwnedFd, path: &Path) -> io::Result<()> {
    let mut at = PathBuf::new();
    for name in path.iter().filter(|name| *name != OsStr::new("/")) {
        at.push(name);
        match mkdirat(root, &at, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
