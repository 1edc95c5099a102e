//! The command lines of docs/net.md, as they stand there but for the path of the socket.

use std::path::Path;

use super::guest::{Image, Vm};
use super::lab::{Daemon, ip, isolate, run, try_run};
use super::traffic::{ping, tcp_by_guest};
use crate::lab::{Skipped, short_dir, zerosock};

const GUIDE: &str = include_str!("../../../../../docs/net.md");
/// The directory of the sockets in the guide.
const DIR: &str = "/tmp/";
const HOST: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";

/// The lines of code that begin with these words, each with the lines that continue it.
fn lines<const N: usize>(start: &str) -> [String; N] {
    let code = GUIDE.lines().filter_map(|line| line.strip_prefix("    "));
    let code = code.collect::<Vec<_>>().join("\n").replace("\\\n", "");
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

fn talk(vm: &Vm) {
    vm.configure(GUEST);
    ping(vm, HOST);
    tcp_by_guest(vm, HOST, 2 << 20);
}
