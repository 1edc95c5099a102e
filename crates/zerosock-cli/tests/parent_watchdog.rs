//! `zerosock parent-watchdog`: the kernel kills the program when its parent is killed.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::process::{DEADLINE, Running, zerosock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

#[test]
fn program_is_killed_when_its_parent_is_killed() {
    let mut parent = Command::new("sh")
        .args([
            "-c",
            r#""$0" parent-watchdog $$ -- sh -c 'echo $$; exec sleep 600' & wait"#,
        ])
        .arg(zerosock().get_program())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let stdout = parent.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut line).unwrap();
    let program = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
    // The descriptor names this process even when its pid is reused.
    let program = pidfd_open(program, PidfdFlags::empty()).unwrap();
    parent.kill().unwrap();
    parent.wait().unwrap();
    let limit = Timespec {
        tv_sec: DEADLINE.as_secs() as i64,
        tv_nsec: 0,
    };
    let ended = poll(&mut [PollFd::new(&program, PollFlags::IN)], Some(&limit)).unwrap();
    if ended == 0 {
        let _ = rustix::process::pidfd_send_signal(&program, rustix::process::Signal::KILL);
    }
    assert_eq!(ended, 1, "the program outlived its parent");
}

#[test]
fn program_is_not_started_after_its_parent_has_ended() {
    // Process 1 is not our parent.
    let mut command = zerosock();
    command.args(["parent-watchdog", "1", "--", "echo", "it runs"]);
    let ended = Running::start(&mut command).finish();
    assert_eq!((ended.code, &ended.stdout[..]), (Some(1), &b""[..]));
    assert!(
        ended.stderr.contains("the parent process has ended"),
        "{}",
        ended.stderr
    );
}
