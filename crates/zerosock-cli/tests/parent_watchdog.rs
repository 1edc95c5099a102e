//! `zerosock leash`: what the demo and the tests start ends with them, also when they are killed.

mod process;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use process::{DEADLINE, Running, zerosock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

#[test]
fn leashed_program_is_killed_with_its_starter() {
    let mut starter = Command::new("sh")
        .args([
            "-c",
            r#""$0" leash $$ -- sh -c 'echo $$; exec sleep 600' & wait"#,
        ])
        .arg(zerosock().get_program())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let said = starter.stdout.take().unwrap();
    BufReader::new(said).read_line(&mut line).unwrap();
    let leashed = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
    // A descriptor means this process, whatever becomes of its number.
    let leashed = pidfd_open(leashed, PidfdFlags::empty()).unwrap();
    starter.kill().unwrap();
    starter.wait().unwrap();
    let limit = Timespec {
        tv_sec: DEADLINE.as_secs() as i64,
        tv_nsec: 0,
    };
    let ended = poll(&mut [PollFd::new(&leashed, PollFlags::IN)], Some(&limit)).unwrap();
    if ended == 0 {
        let _ = rustix::process::pidfd_send_signal(&leashed, rustix::process::Signal::KILL);
    }
    assert_eq!(ended, 1, "it runs on");
}

#[test]
fn leash_refuses_to_run_for_a_starter_that_has_ended() {
    // Process 1 is not our parent.
    let mut command = zerosock();
    command.args(["leash", "1", "--", "echo", "it runs"]);
    let ended = Running::start(&mut command).finish();
    assert_eq!((ended.code, &ended.stdout[..]), (Some(1), &b""[..]));
    assert!(
        ended.stderr.contains("the starter has ended"),
        "{}",
        ended.stderr
    );
}
