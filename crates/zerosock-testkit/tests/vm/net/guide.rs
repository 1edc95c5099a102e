//! The command lines of docs/net.md, as they stand there but for the path of the socket.

use std::path::Path;
use std::process::{Command, Stdio};

use zerosock_cli::vm::children::{self, Guarded};

use super::guest::{Image, Vm};
use super::lab::{Daemon, ip, isolate, run, try_run, wait_until};
use super::traffic::{dhcp_client, ping, tcp_by_guest};
use crate::lab::{Skipped, short_dir, zerosock};

const GUIDE: &str = include_str!("../../../../../docs/net.md");
/// The directory of the sockets in the guide.
const DIR: &str = "/tmp/";
const HOST: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";

/// The title of the section that begins with a bridge.
const NETWORK: &str = "## From a bridge to a guest";

/// The code in a part of the guide.
fn code(part: &str) -> String {
    let code = part.lines().filter_map(|line| line.strip_prefix("    "));
    code.collect::<Vec<_>>().join("\n")
}

/// The lines of code before the last section that begin with these words, each with the lines that continue it.
fn lines<const N: usize>(start: &str) -> [String; N] {
    let (part, _) = GUIDE.split_once(NETWORK).expect("the last section");
    let code = code(part).replace("\\\n", "");
    let found = code.lines().filter(|line| line.starts_with(start));
    let found: Vec<_> = found.map(str::to_owned).collect();
    let shown = format!("the lines of docs/net.md with {start:?}: {found:?}");
    found.try_into().unwrap_or_else(|_| panic!("{shown}"))
}

/// The arguments of a command line. `...` at its end stands for the kernel and more.
fn arguments(line: &str, dir: &Path) -> Vec<String> {
    let line = line.trim_end_matches(" ...");
    let line = line.replace(DIR, &format!("{}/", dir.display()));
    line.split_whitespace().skip(1).map(str::to_owned).collect()
}

/// The bridge and the daemon of the guide with a guest under QEMU; then the switch of the guide with one
/// under user-mode Linux.
pub(crate) fn guide() -> Result<(), Skipped> {
    let (user_mode, debian) = (Image::user_mode()?, Image::debian("6.1")?);
    let [one] = lines("zerosock net --socket /tmp/vm3.net --tap");
    let [switch] = lines("zerosock net --socket /tmp/vm3.net --socket");
    let ([qemu], [uml]) = (lines("qemu-system-x86_64"), lines("linux"));
    let help = run(&zerosock().display().to_string(), "net --help");
    for part in qemu.trim_end_matches(" ...").split(" -").skip(1) {
        assert!(help.contains(part.trim()), "--help has no {part:?}");
    }
    isolate()?;
    for line in lines::<2>("ip link") {
        let words = line.strip_prefix("ip ").unwrap_or_default();
        match try_run("ip", words) {
            Err(text) if text.contains("Unknown device type") => {
                return Err(Skipped("the kernel has no bridges".to_owned()));
            }
            result => drop(result.expect(&line)),
        }
    }
    ip("addr add 10.77.0.1/24 dev br0");
    let dir = short_dir();
    let (qemu, uml) = (arguments(&qemu, dir.path()), arguments(&uml, dir.path()));
    let serve = |line: &str| {
        let words = arguments(line, dir.path());
        Daemon::start(&words[1..].join(" "))
    };
    let daemon = serve(&one);
    talk(&debian.boot_qemu_with(qemu, 1));
    daemon.stop();
    let daemon = serve(&switch);
    talk(&user_mode.boot_user_mode_with(&uml));
    daemon.stop();
    Ok(())
}

/// The last section: the bridge with an address, NAT and dnsmasq, and a guest that reaches a machine without a
/// route to it. That machine does not reach the guest.
pub(crate) fn network() -> Result<(), Skipped> {
    const OUTSIDE: &str = "192.0.2.2";
    let debian = Image::debian("6.12")?;
    for (program, package) in [("nft", "nftables"), ("dnsmasq", "dnsmasq-base")] {
        let found = Command::new(program).arg("--version").output();
        found.map_err(|_| Skipped(format!("install {package}")))?;
    }
    isolate()?;
    let (_, section) = GUIDE.split_once(NETWORK).expect("the last section");
    let section = section.split("guest$").next().unwrap_or_default();
    let code = code(section);
    let (host, rest) = code.split_once("dnsmasq ").expect("dnsmasq");
    let (dnsmasq, serve) = rest.split_once("zerosock net ").expect("zerosock net");
    let dir = short_dir();

    let outside = Outside::start(OUTSIDE)?;
    let made = Command::new("sh").args(["-e", "-c", host]).output();
    let made = made.expect("a shell");
    assert!(made.status.success(), "{made:?}");
    let mut server = children::with_parent_watchdog(zerosock(), Path::new("dnsmasq"));
    let dnsmasq = dnsmasq.replace("\\\n", "");
    server.args(dnsmasq.split_whitespace());
    let leases = format!("--dhcp-leasefile={}", dir.path().join("leases").display());
    server.args(["--keep-in-foreground", "--pid-file", "--user=root", &leases]);
    server.stdin(Stdio::null());
    let _server = Guarded::spawn(&mut server).expect("dnsmasq");
    let serve = arguments(&format!("zerosock {serve}"), dir.path());
    let daemon = Daemon::start(&serve.join(" "));
    let [qemu] = lines("qemu-system-x86_64");
    let vm = debian.boot_qemu_with(arguments(&qemu, dir.path()), 1);

    let text = dhcp_client(&vm);
    assert!(text.contains(&format!("default via {HOST} ")), "{text}");
    ping(&vm, HOST);
    ping(&vm, OUTSIDE);
    let address = text
        .split("inet ")
        .nth(1)
        .and_then(|rest| rest.split('/').next());
    let address = address.unwrap_or_else(|| panic!("{text}"));
    outside.run(&format!("ip route add {address} via 192.0.2.1"));
    outside.run("ping -c 1 -W 5 192.0.2.1");
    assert!(
        outside
            .try_run(&format!("ping -c 1 -W 1 {address}"))
            .is_err()
    );
    // The guest answers where the rule does not stop the request.
    run("nft", "flush chain ip guests forward");
    outside.run(&format!("ping -c 1 -W 5 {address}"));
    drop(vm);
    daemon.stop();
    Ok(())
}

/// A network namespace, joined to that of the calling thread by `eth1`, which has the address 192.0.2.1.
struct Outside(Guarded);

impl Outside {
    fn start(address: &str) -> Result<Outside, Skipped> {
        let mut process = children::with_parent_watchdog(zerosock(), Path::new("unshare"));
        process
            .args(["--net", "sleep", "3600"])
            .stdin(Stdio::null());
        let outside = Outside(Guarded::spawn(&mut process).expect("a namespace"));
        let id = outside.0.id();
        let namespace = |path: String| std::fs::read_link(path).ok();
        let ours = namespace("/proc/thread-self/ns/net".into());
        wait_until("a namespace", || {
            namespace(format!("/proc/{id}/ns/net")) != ours
        });
        let made = try_run("ip", "link add eth1 type veth peer name wan");
        made.map_err(|text| Skipped(format!("no veth: {text}")))?;
        ip(&format!("link set wan netns {id}"));
        ip("addr add 192.0.2.1/24 dev eth1");
        ip("link set eth1 up");
        outside.run(&format!("ip addr add {address}/24 dev wan"));
        outside.run("ip link set wan up");
        Ok(outside)
    }

    /// Runs a program, of iproute2 or of busybox, in the namespace.
    fn try_run(&self, words: &str) -> Result<String, String> {
        let program = if words.starts_with("ip ") {
            ""
        } else {
            "busybox "
        };
        try_run(
            "nsenter",
            &format!("--net=/proc/{}/ns/net {program}{words}", self.0.id()),
        )
    }

    fn run(&self, words: &str) {
        self.try_run(words)
            .unwrap_or_else(|text| panic!("{words}: {text}"));
    }
}

fn talk(vm: &Vm) {
    vm.configure(GUEST);
    ping(vm, HOST);
    tcp_by_guest(vm, HOST, 2 << 20);
}
