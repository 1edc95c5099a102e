//! `serve` with a supervisor: the process that serves is killed, or ends by itself, and a front-end that stays connected has
//! its requests answered by the next one.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use zerosock_vhost_user::ProtocolFeatures;
use zerosock_vhost_user::frontend::Frontend;

use crate::process::{DEADLINE, Running, wait_until, zerosock};

struct Lab {
    dir: tempfile::TempDir,
    serve: Running,
}

impl Lab {
    fn start() -> Lab {
        let dir = tempfile::tempdir().unwrap();
        write_file(&dir, "");
        let mut serve = zerosock();
        serve
            .args(["serve", "--config"])
            .arg(dir.path().join("vms.yaml"));
        let serve = Running::start(&mut serve);
        let lab = Lab { dir, serve };
        wait_until("a socket", || lab.at("vm3").exists());
        lab
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn frontend(&self) -> Frontend {
        let mut device = Frontend::connect(&self.at("vm3"), DEADLINE).unwrap();
        device
            .negotiate(1 << 32, ProtocolFeatures::REPLY_ACK)
            .unwrap();
        device
    }

    /// The process that serves: the child of the supervisor.
    fn worker(&self) -> u32 {
        let id = self.serve.child.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        children.unwrap().trim().parse().expect("one child")
    }

    /// Sends the process that serves a signal, and waits until the supervisor has seen its end.
    fn kill_worker(&self, signal: &str) {
        let said = self.deaths();
        let status = std::process::Command::new("kill")
            .arg(format!("-{signal}"))
            .arg(self.worker().to_string())
            .status();
        assert!(status.unwrap().success());
        wait_until("a death", || self.deaths() > said);
    }

    fn deaths(&self) -> usize {
        self.serve
            .stderr()
            .matches("a successor takes over")
            .count()
    }
}

fn write_file(dir: &tempfile::TempDir, more: &str) {
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (socket, uds) = (at("vm3"), at("uds3"));
    let text = format!("vms:\n  - guest_cid: 3\n    socket: {socket}\n    uds_path: {uds}\n{more}");
    std::fs::write(dir.path().join("vms.yaml"), text).unwrap();
}

#[test]
fn a_front_end_stays_connected_when_the_process_that_serves_dies() {
    let lab = Lab::start();
    let mut device = lab.frontend();
    let features = device.get_features().unwrap();
    // A crash of its own counts, and the third within ten seconds would be one too many.
    for signal in ["KILL", "ILL", "KILL", "ABRT", "KILL"] {
        lab.kill_worker(signal);
        assert_eq!(device.get_features().unwrap(), features, "after {signal}");
        // Acknowledged only where the successor knows that this was negotiated.
        device.set_vring_num(0, 128).unwrap();
    }
    drop(device);
    // The next front-end is served, at the same socket.
    lab.frontend().set_vring_num(1, 64).unwrap();
    lab.serve.signal("TERM");
    let ended = lab.serve.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(!lab.dir.path().join("vm3").exists());
}

#[test]
fn a_mistake_in_the_file_at_the_time_of_a_crash_costs_nothing_but_time() {
    let lab = Lab::start();
    let mut device = lab.frontend();
    let features = device.get_features().unwrap();
    write_file(&lab.dir, "nonsense: 1\n");
    lab.kill_worker("KILL");
    wait_until("another attempt", || lab.deaths() >= 5);
    write_file(&lab.dir, "");
    assert_eq!(device.get_features().unwrap(), features);
}

#[test]
fn host_programs_that_connect_meanwhile_wait_for_the_successor() {
    let lab = Lab::start();
    let _device = lab.frontend();
    write_file(&lab.dir, "nonsense: 1\n");
    lab.kill_worker("KILL");
    let program = UnixStream::connect(lab.at("uds3")).unwrap();
    program
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    write_file(&lab.dir, "");
    std::io::Write::write_all(&mut &program, b"CONNECT 1\n").unwrap();
    // Refused by the device: its queues do not run.
    let mut answer = Vec::new();
    let _ = std::io::Read::read_to_end(&mut &program, &mut answer);
    assert_eq!(answer, b"");
}

#[test]
fn a_file_that_can_be_read_only_once_is_served_without_a_supervisor() {
    let dir = tempfile::tempdir().unwrap();
    write_file(&dir, "");
    let fifo = dir.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let text = std::fs::read(dir.path().join("vms.yaml")).unwrap();
    let mut serve = zerosock();
    serve.args(["serve", "--config"]).arg(&fifo);
    let serve = Running::start(&mut serve);
    std::fs::write(&fifo, text).unwrap();
    wait_until("a socket", || dir.path().join("vm3").exists());
    serve.signal("TERM");
    assert_eq!(serve.finish().code, Some(0));
}
