//! `zerosock net --xdp`, on one end of a veth pair.

use std::os::unix::net::UnixStream;

use zerosock_sys::bpf::BpfError;
use zerosock_sys::tun::InterfaceName;
use zerosock_sys::xdp::{InterfaceOptions, XdpError, XdpInterface};

use crate::isolated::{ip, isolated, start, try_ip, within};
use crate::process::wait_until;
use crate::refused;
use crate::serve::{Server, refusal};

/// Runs a test in a namespace with the interfaces `near` and `far`, which are up.
fn with_interfaces(name: &'static str, test: impl FnOnce() + Send + 'static) {
    isolated(name, move || {
        if let Err(reason) = try_ip("link add near type veth peer name far") {
            println!("SKIPPED {name}: no veth: {reason}");
            return;
        }
        ip("link set near up");
        ip("link set far up");
        let near: InterfaceName = "near".parse().unwrap();
        match XdpInterface::open(&near, InterfaceOptions::default()) {
            Err(XdpError::Program(
                error @ (BpfError::Denied { .. } | BpfError::NotSupported { .. }),
            )) => println!("SKIPPED {name}: {error}"),
            result => {
                drop(result.unwrap());
                // Other tests that start processes have copies of its descriptor for a moment.
                let attached = || ip("link show dev near").contains("prog/xdp");
                wait_until("detached", || !attached());
                test();
            }
        }
    });
}

#[test]
fn program_is_attached_and_goes_with_the_process() {
    with_interfaces("program_is_attached_and_goes_with_the_process", || {
        let net = start("--socket @/net --xdp near");
        assert!(ip("link show dev near").contains("prog/xdp"));
        let said = net.stderr();
        assert!(
            said.contains("near queue 0: the XDP program runs in its driver"),
            "{said}"
        );
        // CAP_NET_ADMIN has the number 12, CAP_BPF 39.
        let status = std::fs::read_to_string(format!("/proc/{}/status", net.id())).unwrap();
        let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let set = u64::from_str_radix(set.unwrap().trim(), 16).unwrap();
        assert_eq!(set & (1 << 12 | 1 << 39), 0, "{set:x}");
        net.signal("USR1");
        wait_until("the counters", || {
            let said = net.stderr();
            said.contains("rx_long=0") && said.contains("tx_copied=0")
        });
        net.stop();
        wait_until("detached", || {
            !ip("link show dev near").contains("prog/xdp")
        });
        // As the uplink of a switch.
        start("--socket @/a --socket @/b --xdp near:0 --xdp-drop-long").stop();
    });
}

#[test]
fn interfaces_that_cannot_be_used_are_refused_by_name() {
    with_interfaces("interfaces_that_cannot_be_used_are_refused_by_name", || {
        for (words, wanted) in [
            ("--xdp other", "xdp other:0: no such interface"),
            ("--xdp near:7", "xdp near:7: it has no queue 7"),
            ("--xdp near --queues 2", "xdp near:0: it has no queue 1"),
        ] {
            let mut net = within("", &format!("--socket @/net {words}"));
            refused(&mut net, 1, wanted);
        }
        let _net = start("--socket @/net --xdp near");
        let mut other = within("", "--socket @/net --xdp near");
        refused(&mut other, 1, "another XDP program is attached");
    });
}

#[test]
fn networks_share_an_interface() {
    with_interfaces("networks_share_an_interface", || {
        ip("link del near");
        let queues = "numrxqueues 2 numtxqueues 2";
        ip(&format!(
            "link add near {queues} type veth peer name far {queues}"
        ));
        ip("link set near up");
        ip("link set far up");
        let file = |second: &str| {
            format!(
                "net:\n- {{xdp: 'near:0', guests: [{{socket: @/a}}]}}\n\
                 - {{{second}, guests: [{{socket: @/b}}]}}\n"
            )
        };
        for (second, wanted) in [
            (
                "xdp: near",
                "xdp near:0: another network has a queue of these",
            ),
            (
                "xdp: 'near:1', xdp_drop_long: true",
                "xdp near:1: the networks of an interface have the same xdp_drop_long",
            ),
        ] {
            let said = refusal(&file(second));
            assert!(said.contains(wanted), "{said}");
        }
        let server = Server::start(&file("xdp: 'near:1'"));
        let said = server.stderr();
        for queue in [
            "near queue 0: the XDP program",
            "near queue 1: the XDP program",
        ] {
            assert!(said.contains(queue), "{said}");
        }
        UnixStream::connect(server.path("a")).unwrap();
        UnixStream::connect(server.path("b")).unwrap();
        // Both that have it, and a new one.
        for changed in [
            "net:\n- {xdp: 'near:0', xdp_drop_long: true, guests: [{socket: @/a}]}\n",
            "net:\n- {xdp: 'near:1', xdp_drop_long: true, guests: [{socket: @/c}]}\n",
        ] {
            server.write(changed);
            let said = server.reload();
            assert!(said.contains("not reloaded"), "{said}");
            assert!(
                said.contains(
                    "xdp_drop_long, and it cannot change while the process runs: it stays false"
                ),
                "{said}"
            );
        }
    });
}

#[test]
fn missing_locked_memory_and_capabilities_are_named() {
    with_interfaces("missing_locked_memory_and_capabilities_are_named", || {
        let without = |capability: &str, wanted: &str| {
            let before = format!(
                "prlimit --memlock=65536 setpriv --bounding-set -{capability} --inh-caps -{capability}"
            );
            let mut net = within(&before, "--socket @/net --xdp near");
            refused(&mut net, 1, wanted);
        };
        without("ipc_lock", "limit 65536 (RLIMIT_MEMLOCK");
        without("net_raw", "CAP_NET_RAW");
    });
}

#[test]
fn interface_that_is_removed_ends_the_service() {
    with_interfaces("interface_that_is_removed_ends_the_service", || {
        for guests in ["--socket @/net", "--socket @/net --socket @/b"] {
            let mut net = start(&format!("{guests} --xdp near"));
            let _front_end = UnixStream::connect(net.path("net")).unwrap();
            ip("link del near");
            refused(&mut net, 1, "the interface was removed");
            ip("link add near type veth peer name far");
            ip("link set near up");
            ip("link set far up");
        }
    });
}
