//! Unit tests of `fds`.

use super::*;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fd::OwnedFd;
use rustix::pipe::{PipeFlags, pipe_with};
use std::fs;
use zerosock_sys::account::Budget;

fn examine(fd: impl Into<OwnedFd>) -> SentFd {
    SentFd::examine(fd.into().into(), &Budget::unlimited().account())
}

#[test]
fn each_kind_is_recognised() {
    let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let pipe = || pipe_with(PipeFlags::CLOEXEC).unwrap().1;
    let memory = || memfd::create("x", 4096, false).unwrap();
    let disk = || OwnedFd::from(tempfile::tempfile().unwrap());
    examine(event()).eventfd().unwrap();
    examine(event()).call().unwrap();
    examine(pipe()).call().unwrap();
    examine(memory()).memory().unwrap();
    examine(disk()).memory().unwrap();

    examine(event()).memory().unwrap_err();
    examine(pipe()).eventfd().unwrap_err();
    examine(memory()).call().unwrap_err();
}

/// An epoll instance has the same inode as eventfds. A socket can be the front-end's own end.
#[test]
fn descriptors_of_unusable_kinds_are_refused() {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let proc = fs::File::open("/proc/self/status").unwrap();
    let null = fs::File::open("/dev/null").unwrap();
    let reasons = [epoll, socket.into(), proc.into(), null.into()].map(|fd| match examine(fd) {
        SentFd::Refused(reason) => reason,
        other => panic!("kept as {other}"),
    });
    assert!(reasons[0].contains("eventpoll"), "{reasons:?}");
    assert!(reasons[2].contains("proc"), "{reasons:?}");
}

#[test]
fn only_regular_files_are_memory() {
    use rustix::fs::{CWD, Mode, mknodat};
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let fifo = fs::File::options().read(true).write(true).open(fifo);
    let dir = fs::File::open(dir.path());
    for fd in [fifo, dir] {
        match examine(fd.unwrap()) {
            SentFd::Refused(reason) => assert!(reason.contains("regular"), "{reason}"),
            other => panic!("kept as {other}"),
        }
    }
}

/// Those of a daemon in a mount namespace of its own look like this.
#[test]
fn file_opened_in_another_mount_namespace_is_memory() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    let file = tempfile::NamedTempFile::new().unwrap();
    let found = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::TYPE).unwrap();
    let device = format!(" {}:{} ", found.stx_dev_major, found.stx_dev_minor);
    if !fs::read_to_string("/proc/self/mountinfo")
        .unwrap()
        .contains(&device)
    {
        return println!("SKIPPED: files here have another device number than their mount");
    }
    let mut child = Command::new("unshare")
        .args(["-m", "sh", "-c", "echo ready; exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut line = String::new();
    if let Ok(child) = &mut child {
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
    }
    let Some(mut child) = child.ok().filter(|_| line == "ready\n") else {
        return println!("SKIPPED: cannot make a mount namespace");
    };
    let path = format!("/proc/{}/root{}", child.id(), file.path().display());
    let inside = fs::File::options().read(true).write(true).open(path);
    drop(child.stdin.take());
    let result = examine(inside.unwrap()).memory();
    child.wait().unwrap();
    result.unwrap();
}

#[test]
fn a_kept_descriptor_counts_until_it_is_closed() {
    let limits = zerosock_sys::account::Limits {
        descriptors: 2,
        numbers: u64::MAX,
        mapped: 0,
        mapped_each: 0,
    };
    let account = Budget::new(limits, 1).account();
    let fds: Vec<_> = (0..3)
        .map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap())
        .map(|fd| SentFd::examine(fd.into(), &account))
        .collect();
    assert!(matches!(fds[2], SentFd::Refused(_)));
    assert_eq!(account.descriptors(), 2);
    drop(fds);
    assert!(reaper::drain(std::time::Duration::from_secs(60)));
    assert_eq!(account.descriptors(), 0);
}
