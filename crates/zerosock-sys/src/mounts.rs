//! Which mounts of this process can be used without a file system's server.
//!
//! A user can mount a file system that the user's own process serves (FUSE), and leave requests unanswered.
//! The owner of a file does not tell: the root of such a mount shows uid 0. The list of mounts does.
//!
//! # Invariants
//! - `is_local` makes one call that does not wait, and says yes only while no mount has come or gone
//!   since the list was read: the kernel gives a number out again at once.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::fs::{Statx, StatxFlags};

use crate::ready::wait_ready;

/// File systems in memory or on a local disk. Their calls, and page faults, end without help of a peer. The
/// layers of an overlay may be on others, which its mount does not tell; but only root makes such a mount
/// where this process sees it.
const LOCAL_FILE_SYSTEMS: [&str; 12] = [
    "tmpfs",
    "ramfs",
    "devtmpfs",
    "rootfs",
    "hugetlbfs",
    "ext4",
    "xfs",
    "btrfs",
    "overlay",
    "f2fs",
    "zfs",
    "bcachefs",
];

/// Whether a file system of this type is in memory or on a local disk.
pub fn is_local_type(kind: &str) -> bool {
    LOCAL_FILE_SYSTEMS.contains(&kind)
}

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mount<'a> {
    /// The number of the mount.
    pub id: &'a str,
    /// The device, as `major:minor`.
    pub device: &'a str,
    /// The type of the file system.
    pub kind: &'a str,
    /// Options of the file system, separated by commas.
    options: &'a str,
}

/// The mounts in the text of `/proc/self/mountinfo`.
pub fn parse(text: &str) -> impl Iterator<Item = Mount<'_>> {
    text.lines().filter_map(|line| {
        // proc(5): "id parent major:minor root point options [tags] - type source options"; spaces within
        // fields are escaped.
        let (first, second) = line.split_once(" - ")?;
        let mut first = first.split(' ');
        let mut second = second.split(' ');
        Some(Mount {
            id: first.next()?,
            device: first.nth(1)?,
            kind: second.next()?,
            options: second.nth(1).unwrap_or_default(),
        })
    })
}

/// What may be done with the files of a mount.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum MountClass {
    /// Anything.
    Local,
    /// It may have a server, which root or our own user has chosen: calls may take time.
    Served,
    /// The links of procfs, which lead to objects and not to paths.
    Proc,
    /// Nothing: the server is a process of this user.
    ServedByOther(u32),
}

impl Mount<'_> {
    fn class(&self) -> MountClass {
        let is_fuse = matches!(self.kind, "fuse" | "fuseblk") || self.kind.starts_with("fuse.");
        match self.kind {
            "proc" => MountClass::Proc,
            kind if is_local_type(kind) => MountClass::Local,
            _ if is_fuse => {
                let user = self.options.split(',');
                let mut user = user.filter_map(|option| option.strip_prefix("user_id="));
                let user = user.next_back().and_then(|user| user.parse().ok());
                match user.unwrap_or(u32::MAX) {
                    user if is_trusted_user(user) => MountClass::Served,
                    user => MountClass::ServedByOther(user),
                }
            }
            _ => MountClass::Served,
        }
    }
}

/// Whether a user may decide where a path leads: root, or our own user.
pub fn is_trusted_user(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// The list of mounts of the namespace in which other processes are, if this one has left it.
static KEPT_LIST: OnceLock<Mutex<File>> = OnceLock::new();

/// Keeps the list of mounts of this namespace, before this process leaves it.
///
/// # Errors
/// `/proc` is not mounted.
pub(crate) fn keep_list() -> io::Result<()> {
    // An open file of procfs stays with the namespace in which it was opened.
    let list = File::open("/proc/self/mountinfo")?;
    let _ = KEPT_LIST.set(Mutex::new(list));
    Ok(())
}

/// Forgets what is known of the mounts of the namespace that this process has left.
pub(crate) fn forget() {
    *known() = Known::default();
}

/// The text of `/proc/self/mountinfo`, of the namespace in which other processes open their files.
///
/// # Errors
/// `/proc` is not mounted.
pub fn list_of_others() -> io::Result<String> {
    let Some(list) = KEPT_LIST.get() else {
        return fs::read_to_string("/proc/self/mountinfo");
    };
    let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
    list.rewind()?;
    let mut text = String::new();
    list.read_to_string(&mut text)?;
    Ok(text)
}

/// The list of mounts when it was read last.
#[derive(Default)]
struct Known {
    /// Open since before the list was read: poll(2) tells whether it has changed.
    list: Option<File>,
    local: HashSet<u64>,
}

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

fn known() -> MutexGuard<'static, Known> {
    // Nothing that can panic happens between two changes.
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the mount of this number is known to be local. Does not wait. False also means that the list has
/// to be read first, which [`learn`] does.
pub(crate) fn is_local(id: u64) -> bool {
    let mut known = known();
    let Some(list) = &known.list else {
        return false;
    };
    let changed = wait_ready(list, PollFlags::PRI, Some(Duration::ZERO));
    if !changed.is_ok_and(|events| events.is_empty()) {
        *known = Known::default();
        return false;
    }
    known.local.contains(&id)
}

/// Reads the list of mounts. It takes as long as the list is.
///
/// # Errors
/// `/proc` is not mounted.
pub fn learn() -> io::Result<()> {
    read().map(drop)
}

fn read() -> io::Result<String> {
    let mut list =
        File::open("/proc/thread-self/mountinfo").map_err(|error| match error.kind() {
            // `NotFound` means a mount that is not in the list.
            io::ErrorKind::NotFound => io::Error::new(
                io::ErrorKind::Unsupported,
                "/proc is not mounted; without it the file system of a path is not known",
            ),
            _ => error,
        })?;
    let mut text = String::new();
    list.read_to_string(&mut text)?;
    let local = parse(&text).filter(|mount| mount.class() == MountClass::Local);
    let local = local.filter_map(|mount| mount.id.parse().ok()).collect();
    *known() = Known {
        list: Some(list),
        local,
    };
    Ok(text)
}

/// Times that the list is read for a mount that is not in it: mounts may come and go meanwhile.
const ATTEMPTS: usize = 3;

/// What may be done with the files of the mount of this number. Reads the list if the mount is not known.
///
/// # Errors
/// `NotFound`: it is no mount where this process sees it. Those of reading the list.
pub(crate) fn class(id: u64) -> io::Result<MountClass> {
    if is_local(id) {
        return Ok(MountClass::Local);
    }
    let number = id.to_string();
    for _ in 0..ATTEMPTS {
        let text = read()?;
        if let Some(mount) = parse(&text).find(|mount| mount.id == number) {
            return Ok(mount.class());
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// The number of the mount on which a file was opened, for which `status` was asked for `MNT_ID`.
///
/// # Errors
/// `/proc` is not mounted, and the kernel is older than Linux 5.8.
pub(crate) fn mount_of(file: impl AsFd, status: &Statx) -> io::Result<u64> {
    if status.stx_mask & StatxFlags::MNT_ID.bits() != 0 {
        return Ok(status.stx_mnt_id);
    }
    let number = number(file)?;
    let number = number.and_then(|number| number.parse().ok());
    number.ok_or_else(|| io::ErrorKind::Unsupported.into())
}

/// The number of the mount on which a file was opened, as `/proc/self/fdinfo` shows it.
///
/// # Errors
/// `/proc` is not mounted.
pub fn number(file: impl AsFd) -> io::Result<Option<String>> {
    let path = format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd());
    let text = fs::read_to_string(path)?;
    let mut lines = text.lines();
    let number = lines.find_map(|line| line.strip_prefix("mnt_id:"));
    Ok(number.map(|number| number.trim().to_owned()))
}

#[cfg(test)]
#[path = "mounts_tests.rs"]
mod tests;
