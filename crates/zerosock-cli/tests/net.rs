//! `zerosock net` without a guest: options, interfaces, sockets, capabilities and signals. Each test has a
//! network namespace of its own.

#[path = "net/isolated.rs"]
mod isolated;
mod process;
#[path = "net/serve.rs"]
mod serve;
#[path = "net/xdp.rs"]
mod xdp;

use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::thread;

use isolated::{Net, ip, isolated, open_as_stranger, start, try_ip, within};
use process::{DEADLINE, Running, wait_until, zerosock};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use zerosock_sys::tun::{AccessError, Tap, TapError};

/// Fails with this exit code, and says this.
#[track_caller]
fn refused(net: &mut Net, code: i32, wanted: &str) {
    let ended = net.take().finish();
    assert_eq!(ended.code, Some(code), "{}", ended.stderr);
    assert!(
        ended.stderr.contains(wanted),
        "{wanted:?}: {}",
        ended.stderr
    );
}

#[test]
fn options_that_do_not_go_together_are_refused_by_name() {
    for (words, wanted) in [
        ("", "--socket <PATH"),
        ("--socket a", "--tap: name the interface"),
        ("--socket a --tap t --tap-fd 3", "cannot be used with"),
        ("--socket a --tap-fd 3 --bridge b", "cannot be used with"),
        ("--socket a --tap-fd 3 --queues 2", "cannot be used with"),
        ("--socket a --socket b --bridge b", "--bridge: needs tap"),
        ("--socket a --tap t --mac-filter", "--mac <MAC>"),
        ("--socket a,mac-filter --tap t", "--mac-filter: needs mac"),
        ("--socket a,mack=5 --tap t", "give mac=MAC or mac-filter"),
        ("--socket a --tap t --mac 01:00:00:00:00:01", "--mac"),
        ("--socket a --tap t --queues 0", "--queues: 1 to 16"),
        ("--socket a --tap t --queues 17", "--queues: 1 to 16"),
        ("--socket a --tap t --mtu 67", "--mtu: 68 to 65521, not 67"),
        ("--socket a --tap t --mtu 65536", "--mtu"),
        ("--socket a --tap a-name-of-sixteen", "1 to 15 bytes"),
        (
            "--socket a --tap t --socket-mode 0999",
            "--socket-mode 0999: give permission bits in octal",
        ),
        ("--socket a --xdp e0 --tap t", "cannot be used with"),
        ("--socket a --xdp e0:256", "IFACE[:QUEUE]"),
        ("--socket a --tap t --xdp-copy", "--xdp"),
        ("--socket a --xdp e0 --share-tap", "--share-tap: needs tap"),
        ("--socket a --xdp e0 --mtu 1511", "--mtu: at most 1510"),
        ("--socket a --socket a", "a: used by two guests"),
        ("--socket a --socket b --queues 2", "--queues: a switch"),
        (
            "--socket a --socket b --mac 52:54:00:00:00:01",
            "with several guests",
        ),
        (
            "--socket a,mac=52:54:00:00:00:01 --socket b,mac=52:54:00:00:00:01",
            "--mac: used by two",
        ),
    ] {
        let ended = Running::start(zerosock().arg("net").args(words.split_whitespace())).finish();
        assert_eq!(ended.code, Some(2), "{words}: {}", ended.stderr);
        assert!(ended.stderr.contains(wanted), "{words}: {}", ended.stderr);
    }
}

#[test]
fn an_interface_is_made_and_goes_with_the_process() {
    isolated("an_interface_is_made_and_goes_with_the_process", || {
        let net = start("--socket @/net --tap tap --mtu 4000");
        let shown = ip("-o link show dev tap");
        assert!(
            shown.contains(",UP") && shown.contains("mtu 4000"),
            "{shown}"
        );
        assert!(shown.contains("NO-CARRIER"), "{shown}");
        // CAP_NET_ADMIN has the number 12.
        let status = std::fs::read_to_string(format!("/proc/{}/status", net.id())).unwrap();
        let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let set = u64::from_str_radix(set.unwrap().trim(), 16).unwrap();
        assert_eq!(set & 1 << 12, 0, "{set:x}");
        let socket = net.path("net");
        assert!(socket.exists());
        net.stop();
        assert!(!socket.exists());
        assert!(try_ip("link show dev tap").is_err());
    });
}

#[test]
fn an_interface_that_exists_is_taken_and_stays() {
    isolated("an_interface_that_exists_is_taken_and_stays", || {
        for kind in ["", " multi_queue"] {
            ip(&format!("tuntap add dev tap mode tap{kind}"));
            start("--socket @/net --tap tap").stop();
            ip("link show dev tap");
            ip(&format!("tuntap del dev tap mode tap{kind}"));
        }
        ip("tuntap add dev tap mode tap");
        refused(
            &mut within("", "--socket @/net --tap tap --queues 2"),
            1,
            "is no TAP with as many",
        );
        refused(
            &mut within("", "--socket @/net --tap lo"),
            1,
            "tap lo: it exists and is no TAP",
        );
        let _net = start("--socket @/net --tap tap");
        let wanted = "tap tap: another process has it open";
        refused(&mut within("", "--socket @/net --tap tap"), 1, wanted);
    });
}

/// `pi` and `vnet_hdr` give the flags 0x0102, 0x1102 and 0x5102 of TUNSETIFF.
#[test]
fn another_user_gets_no_queue_of_the_interface() {
    isolated("another_user_gets_no_queue_of_the_interface", || {
        let forms = ["pi", "", "vnet_hdr"];
        // It is made, exists without an owner, or exists and has one queue in use of several.
        for (kind, queues) in [("", 2), ("multi_queue", 2), ("multi_queue", 1)] {
            if !kind.is_empty() {
                ip(&format!("tuntap add dev tap mode tap {kind}"));
            }
            let net = start(&format!("--socket @/net --tap tap --queues {queues}"));
            for form in forms {
                let opened = open_as_stranger("tap", &format!("multi_queue {form}"));
                let reason = opened.expect_err(form);
                assert!(
                    reason.contains("not permitted"),
                    "{kind} {queues} {form}: {reason}"
                );
            }
            net.stop();
            if !kind.is_empty() {
                // The owner stays.
                assert!(ip("-d link show dev tap").contains("user root"));
                ip(&format!("tuntap del dev tap mode tap {kind}"));
            }
        }
        let _net = start("--socket @/net --tap tap");
        for form in forms {
            let reason = open_as_stranger("tap", form).expect_err(form);
            assert!(reason.contains("busy"), "{form}: {reason}");
        }
    });
}

#[test]
fn an_interface_that_others_have_or_may_open_is_taken_only_shared() {
    const NAME: &str = "an_interface_that_others_have_or_may_open_is_taken_only_shared";
    isolated(NAME, || {
        let open = |queues| Tap::open(&"tap".parse().unwrap(), queues);
        let refuse = |queues: u16, wanted: &str| {
            let words = format!("--socket @/net --tap tap --queues {queues}");
            refused(&mut within("", &words), 1, &format!("tap tap: {wanted}"));
        };
        let share = |queues: u16| {
            start(&format!(
                "--socket @/net --tap tap --share-tap --queues {queues}"
            ))
        };
        // Of one queue: the kernel lets no second program open it, whatever its owner is.
        ip("tuntap add dev tap mode tap user 65534");
        start("--socket @/net --tap tap").stop();
        ip("tuntap del dev tap mode tap");
        // Made for another user or a group.
        for owner in ["user 65534", "group 65534"] {
            ip(&format!("tuntap add dev tap mode tap multi_queue {owner}"));
            let id = owner.replace("user", "uid").replace("group", "gid");
            for queues in [1, 2] {
                let remedy = "make it with `ip tuntap add mode tap multi_queue user 0`";
                refuse(
                    queues,
                    &format!(
                        "programs of {id} may open further queues of it, and get \
                    frames of the guest; {remedy}, or permit this with --share-tap"
                    ),
                );
                share(queues).stop();
            }
            assert!(ip("-d link show dev tap").contains(owner.split_once(' ').unwrap().0));
            ip("tuntap del dev tap mode tap multi_queue");
        }
        // In use by the same user.
        let first = start("--socket @/net --tap tap --queues 2");
        for queues in [1, 2] {
            let wanted = "another process has it open, with 2 of its queues (owner: uid 0); end it, \
                          or permit this with --share-tap";
            refuse(queues, wanted);
        }
        share(2).stop();
        first.stop();
        // In use by another user, since before.
        ip("tuntap add dev tap mode tap multi_queue");
        let stranger = thread::spawn(move || {
            let uid = Uid::from_raw(65534);
            set_thread_res_uid(uid, uid, uid).unwrap();
            Tap::open(&"tap".parse().unwrap(), 1).unwrap()
        });
        let stranger = stranger.join().unwrap();
        refuse(
            1,
            "another process has it open, with 1 of its queues (owner: uid 65534)",
        );
        drop(stranger);
        ip("tuntap del dev tap mode tap multi_queue");
        // A process that shares it still keeps other users away.
        let net = share(2);
        let reason = open_as_stranger("tap", "multi_queue").unwrap_err();
        assert!(reason.contains("not permitted"), "{reason}");
        assert!(matches!(
            open(1),
            Err(TapError::Access(AccessError::Shared { others: 2, .. }))
        ));
        net.stop();
    });
}

#[test]
fn an_interface_becomes_a_port_of_a_bridge() {
    isolated("an_interface_becomes_a_port_of_a_bridge", || {
        let missing = "tap tap: cannot be a port of bridge br0: there is no bridge br0: make it";
        refused(
            &mut within("", "--socket @/net --tap tap --bridge br0"),
            1,
            missing,
        );
        if let Err(reason) = try_ip("link add br0 type bridge") {
            println!("SKIPPED the bridge in an_interface_becomes_a_port_of_a_bridge: {reason}");
            return;
        }
        let net = start("--socket @/net --tap tap --bridge br0");
        assert!(ip("-o link show dev tap").contains("master br0"));
        net.stop();
        // One that is a port already, as the file system of the namespace shows it.
        ip("tuntap add dev tap mode tap");
        ip("link set tap master br0");
        let mut net = within(
            "mount -t sysfs sys /sys",
            "--socket @/net --tap tap --bridge br0",
        );
        net.wait();
        net.stop();
        ip("link add br1 type bridge");
        let wanted = "tap tap: cannot be a port of bridge br1: it is a port of another bridge";
        refused(
            &mut within("", "--socket @/net --tap tap --bridge br1"),
            1,
            wanted,
        );
    });
}

#[test]
fn an_interface_comes_by_descriptors() {
    isolated("an_interface_comes_by_descriptors", || {
        let tap = Tap::open(&"tap".parse().unwrap(), 2).unwrap();
        let numbers = tap.queues().iter().map(|queue| {
            fcntl_setfd(queue, FdFlags::empty()).unwrap();
            queue.as_raw_fd().to_string()
        });
        let numbers = numbers.collect::<Vec<_>>().join(",");
        start(&format!("--socket @/net --tap-fd {numbers}")).stop();
        let wanted = "--tap-fd: the descriptor is none of a TAP";
        refused(&mut within("", "--socket @/net --tap-fd 0"), 1, wanted);
        refused(
            &mut within("", "--socket @/net --tap-fd 999"),
            1,
            "--tap-fd: ",
        );
    });
}

#[test]
fn without_the_capability_only_an_interface_of_the_user_is_taken() {
    isolated(
        "without_the_capability_only_an_interface_of_the_user_is_taken",
        || {
            let drop = "setpriv --bounding-set -net_admin --inh-caps -net_admin";
            let wanted = "tap tap: cannot create or take it: Operation not permitted";
            refused(&mut within(drop, "--socket @/net --tap tap"), 1, wanted);
            ip("tuntap add dev tap mode tap user root");
            let wanted = "tap tap: cannot bring it up: Operation not permitted";
            refused(&mut within(drop, "--socket @/net --tap tap"), 1, wanted);
            ip("link set tap up mtu 2000");
            let wanted = "mtu 4000: tap: Operation not permitted";
            refused(
                &mut within(drop, "--socket @/net --tap tap --mtu 4000"),
                1,
                wanted,
            );
            let mut net = within(drop, "--socket @/net --tap tap --mtu 2000");
            net.wait();
            net.stop();
        },
    );
}

#[test]
fn without_the_tun_driver_it_says_so() {
    isolated("without_the_tun_driver_it_says_so", || {
        let hidden = "mount -t tmpfs none /dev/net";
        let wanted = "tap tap: cannot open /dev/net/tun: No such file or directory";
        refused(&mut within(hidden, "--socket @/net --tap tap"), 1, wanted);
    });
}

#[test]
fn a_socket_in_use_is_left_alone_and_a_stale_one_replaced() {
    isolated(
        "a_socket_in_use_is_left_alone_and_a_stale_one_replaced",
        || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("net");
            let words = format!("--socket {} --tap tap", path.display());
            let listener = UnixListener::bind(&path).unwrap();
            refused(&mut within("", &words), 1, "in use by a live process");
            drop(listener);
            start(&words).stop();
            std::fs::write(&path, "").unwrap();
            refused(&mut within("", &words), 1, "exists and is not a socket");
        },
    );
}

#[test]
fn a_signal_logs_the_counters_of_all_guests() {
    isolated("a_signal_logs_the_counters_of_all_guests", || {
        let net = start("--socket @/a --socket @/b --tap tap");
        let _front_end = UnixStream::connect(net.path("a")).unwrap();
        for round in 1..3 {
            net.signal("USR1");
            let lines = |device: &str| {
                let said = net.stderr();
                let lines = said.lines().filter(|line| line.contains(" INFO counters "));
                lines
                    .filter(|line| line.contains(&format!("{device}\" rx_frames=")))
                    .count()
            };
            wait_until("the counters", || {
                lines("/a") == round && lines("/b") == round
            });
        }
        net.stop();
    });
}

/// The commands of the units for a network device and for a relay.
#[test]
fn the_units_start_and_tell_the_service_manager_when_they_serve() {
    isolated(
        "the_units_start_and_tell_the_service_manager_when_they_serve",
        || {
            for unit in [
                include_str!("../../../dist/zerosock-net@.service"),
                include_str!("../../../dist/zerosock-relay@.service"),
            ] {
                let dir = tempfile::tempdir().unwrap();
                let at = |name: &str| dir.path().join(name).display().to_string();
                let line = unit
                    .lines()
                    .find_map(|line| line.strip_prefix("ExecStart="));
                let (program, line) = line.unwrap().split_once(' ').unwrap();
                assert!(program.ends_with("/zerosock") && unit.contains("Type=notify"));
                let ends = format!("unix-listen:{} unix:{}", at("in"), at("out"));
                let line = line
                    .replace("/run/zerosock-net", &at(""))
                    .replace("%i", "tap3");
                let line = line
                    .replace("$OPTIONS", "--queues 2")
                    .replace("$ARGUMENTS", &ends);
                let manager = UnixDatagram::bind(at("notify")).unwrap();
                manager.set_read_timeout(Some(DEADLINE)).unwrap();
                let mut command = zerosock();
                command.env("NOTIFY_SOCKET", at("notify"));
                let running = Running::start(command.args(line.split_whitespace()));
                let mut message = [0; 64];
                let length = manager.recv(&mut message).unwrap();
                assert!(
                    message[..length].starts_with(b"READY=1"),
                    "{}",
                    running.stderr()
                );
                running.signal("TERM");
                let ended = running.finish();
                assert_eq!(ended.code, Some(0), "{}", ended.stderr);
            }
        },
    );
}

#[test]
fn an_interface_that_is_removed_ends_the_service() {
    isolated("an_interface_that_is_removed_ends_the_service", || {
        let mut net = start("--socket @/net --tap tap");
        ip("link del tap");
        refused(&mut net, 1, "the interface was removed");
        // Also the uplink of a switch.
        let mut net = start("--socket @/a --socket @/b --tap tap");
        ip("link del tap");
        refused(&mut net, 1, "the interface was removed");
    });
}
