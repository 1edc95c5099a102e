//! Networks in the file of `zerosock serve`.

use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;

use tempfile::TempDir;

use crate::isolated::{ip, isolated, try_ip};
use crate::process::{DEADLINE, Running, wait_until, zerosock};

/// What a server with this file says that cannot serve it.
pub(crate) fn refusal(file: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, file.replace('@', &dir.path().display().to_string())).unwrap();
    let mut serve = zerosock();
    serve.args(["serve", "--config"]).arg(path);
    let ended = Running::start(&mut serve).finish();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    ended.stderr
}

/// A server with a file.
pub(crate) struct Server {
    dir: TempDir,
    serve: Option<Running>,
    /// What the server tells the service manager.
    manager: Option<UnixDatagram>,
}

impl Server {
    pub(crate) fn start(file: &str) -> Server {
        Server::start_with(file, &[])
    }

    /// As [`start`](Server::start), with more arguments.
    pub(crate) fn start_with(file: &str, more: &[&str]) -> Server {
        let mut server = Server {
            dir: tempfile::tempdir().unwrap(),
            serve: None,
            manager: None,
        };
        server.write(file);
        let manager = UnixDatagram::bind(server.path("notify")).unwrap();
        manager.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut serve = zerosock();
        serve.args(["serve", "--config"]).arg(server.path("file"));
        serve.args(more);
        serve.env("NOTIFY_SOCKET", server.path("notify"));
        server.serve = Some(Running::start(&mut serve));
        server.manager = Some(manager);
        server.wait_until_ready();
        server
    }

    /// Reads what the server tells the service manager, up to the message that it is ready. A server
    /// waits with the tenth message that is not read.
    fn wait_until_ready(&self) {
        let manager = self.manager.as_ref().unwrap();
        let mut message = [0; 1024];
        loop {
            let length = manager.recv(&mut message);
            let length = length.unwrap_or_else(|error| panic!("{error}: {}", self.stderr()));
            if String::from_utf8_lossy(&message[..length]).contains("READY=1") {
                return;
            }
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the file; `@` stands for the directory.
    pub(crate) fn write(&self, file: &str) {
        let file = file.replace('@', &self.dir.path().display().to_string());
        std::fs::write(self.path("file"), file).unwrap();
    }

    pub(crate) fn stderr(&self) -> String {
        self.serve.as_ref().unwrap().stderr()
    }

    /// Reloads the file; returns what is new in the log.
    pub(crate) fn reload(&self) -> String {
        let before = self.stderr().len();
        self.serve.as_ref().unwrap().signal("HUP");
        let new = || self.stderr()[before..].to_owned();
        wait_until("an answer", || {
            new().contains("reloaded") && new().ends_with('\n')
        });
        self.wait_until_ready();
        new()
    }

    fn stop(mut self) -> String {
        let serve = self.serve.take().unwrap();
        serve.signal("TERM");
        let ended = serve.finish();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stderr
    }
}

/// The first file may have no networks: a later one may have some then, on interfaces that exist.
#[test]
fn a_daemon_without_networks_has_no_capabilities_for_them() {
    isolated(
        "a_daemon_without_networks_has_no_capabilities_for_them",
        || {
            let vm = "vms: [{guest_cid: 3, socket: @/vm, uds_path: @/uds}]\n";
            // With a sandbox, networks may be added only to others.
            let server = Server::start_with(vm, &["--sandbox", "off"]);
            let pid = server.serve.as_ref().unwrap().child.id();
            // The process that serves is the child of the supervisor, which keeps its capabilities.
            let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            let pid: u32 = children.unwrap().trim().parse().expect("one child");
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
            let set = u64::from_str_radix(set.unwrap().trim(), 16).unwrap();
            // CAP_NET_ADMIN has the number 12.
            assert_eq!(set & 1 << 12, 0, "{set:x}");
            server.write(&format!(
                "{vm}net: [{{tap: missing, guests: [{{socket: @/net}}]}}]\n"
            ));
            let said = server.reload();
            assert!(said.contains("not reloaded"), "{said}");
            ip("tuntap add dev there mode tap");
            ip("link set there up");
            server.write(&format!(
                "{vm}net: [{{tap: there, guests: [{{socket: @/net}}]}}]\n"
            ));
            let said = server.reload();
            assert!(!said.contains("not reloaded"), "{said}");
            server.stop();
        },
    );
}

#[test]
fn the_first_line_of_the_log_says_that_it_serves() {
    isolated("the_first_line_of_the_log_says_that_it_serves", || {
        let server = Server::start(
            "vms: [{guest_cid: 3, socket: @/vm, uds_path: @/uds}]\n\
             net: [{tap: t0, guests: [{socket: @/net}]}, {guests: [{socket: @/a}, {socket: @/b}]}]\n",
        );
        let said = server.stop();
        let first = said.lines().next().unwrap();
        assert!(first.contains(" INFO serving vms=1 "), "{said}");
        assert_eq!(
            said.matches(" INFO serving interface=").count(),
            2,
            "{said}"
        );
    });
}

/// Asks for the features as a front-end does (GET_FEATURES, version 1). False: it was disconnected.
fn has_features(front_end: &mut UnixStream) -> bool {
    front_end.set_read_timeout(Some(DEADLINE)).unwrap();
    let request = [1_u32, 1, 0].map(u32::to_ne_bytes).concat();
    if front_end.write_all(&request).is_err() {
        return false;
    }
    front_end.read_exact(&mut [0; 20]).is_ok()
}

#[test]
fn a_reload_starts_and_ends_networks_and_leaves_the_others() {
    isolated(
        "a_reload_starts_and_ends_networks_and_leaves_the_others",
        || {
            let one = "- tap: tap\n  guests: [{socket: @/one}]\n";
            let switch = "- guests: [{socket: @/a, mac: '52:54:00:00:00:0a'}, {socket: @/b}]\n";
            let other = "- tap: other\n  guests: [{socket: @/two}]\n";
            let server = Server::start(&format!("net:\n{one}{switch}"));
            let reload = |networks: &[&str]| {
                server.write(&format!("net:\n{}", networks.concat()));
                server.reload()
            };
            let connect = |name| UnixStream::connect(server.path(name)).unwrap();
            let mut guests = ["one", "a", "b"].map(connect);
            let mut all = || guests.iter_mut().all(has_features);
            assert!(all());
            let said = reload(&[one, switch]);
            assert!(said.contains("net=2"), "{said}");
            // A fault, an interface for which the capabilities are gone, one that is in use: nothing changes.
            let faulty = one.replace("tap: tap", "tap: tap\n  queues: 17");
            let mtu = one.replace("tap: tap", "tap: tap\n  mtu: 1400");
            for (networks, reason) in [
                ([&*faulty, ""], "net[0].queues: 1 to 16"),
                (
                    [switch, other],
                    "tap other: cannot create or take it: Operation not permitted",
                ),
                ([switch, &*mtu], "tap tap: another process has it open"),
            ] {
                let said = reload(&networks);
                let unchanged = said.contains("nothing was changed") && said.contains(reason);
                assert!(unchanged, "{reason}: {said}");
                assert!(all(), "{reason}");
            }
            assert!(!server.path("two").exists());
            // An interface that exists needs no capabilities.
            ip("tuntap add other mode tap");
            ip("link set other up");
            let said = reload(&[one, switch, other]);
            assert!(said.contains("net=3"), "{said}");
            let mut two = connect("two");
            assert!(has_features(&mut two) && all());
            let said = reload(&[switch, other]);
            assert!(said.contains("tap\" rx_frames=0"), "{said}");
            assert!(has_features(&mut two));
            let [mut gone, mut a, mut b] = guests;
            assert!(has_features(&mut a) && has_features(&mut b) && !has_features(&mut gone));
            assert!(!server.path("one").exists() && try_ip("link show dev tap").is_err());
            let said = server.stop();
            for device in ["other", "/a", "/b"] {
                let wanted = format!("{device}\" rx_frames=0");
                assert!(said.contains(&wanted), "{wanted}: {said}");
            }
        },
    );
}

#[test]
fn the_file_of_the_guide_is_served() {
    let guide = include_str!("../../../../docs/net.md");
    let code = guide.lines().filter_map(|line| line.strip_prefix("    "));
    let file = code.skip_while(|line| *line != "net:");
    let file = file.take_while(|line| *line == "net:" || line.starts_with("  "));
    let file = file.collect::<Vec<_>>().join("\n");
    assert!(file.contains("guests:"), "{file}");
    isolated("the_file_of_the_guide_is_served", move || {
        if let Err(reason) = try_ip("link add br0 type bridge") {
            println!("SKIPPED the_file_of_the_guide_is_served: {reason}");
            return;
        }
        let server = Server::start(&file.replace("/run/zerosock/", "@/"));
        for interface in ["tap3", "up0"] {
            let shown = ip(&format!("-o link show dev {interface}"));
            assert!(shown.contains("master br0"), "{shown}");
        }
        for socket in ["3.net", "4.net", "5.net"] {
            let mut guest = UnixStream::connect(server.path(socket)).unwrap();
            assert!(has_features(&mut guest), "{socket}");
        }
        server.stop();
    });
}

#[test]
fn a_network_without_its_interface_ends_and_the_others_go_on() {
    isolated(
        "a_network_without_its_interface_ends_and_the_others_go_on",
        || {
            let file = "net:\n- tap: first\n  guests: [{socket: @/first}]\n\
                    - tap: second\n  guests: [{socket: @/second}]\n";
            let server = Server::start(file);
            let connect = |name: &str| UnixStream::connect(server.path(name));
            let mut guests = ["first", "second"].map(|name| connect(name).unwrap());
            assert!(guests.iter_mut().all(has_features));
            ip("link del first");
            let wanted = "net: the interface was removed";
            wait_until("the end of a network", || server.stderr().contains(wanted));
            let [first, second] = &mut guests;
            wait_until("a disconnect", || !has_features(first));
            assert!(has_features(second));
            wait_until("the end of the socket", || connect("first").is_err());
            server.stop();
        },
    );
}
