//! The relays: their commands, and where their programs are.

use std::fmt::Write;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use zerosock_relay::relay::Way;

use super::address::{Address, Kind};
use crate::binary::Binary;
use crate::peers::install;

/// The name under which this program is the command `zerosock`.
pub(crate) const COMMAND: &str = "zerosock";
/// Worker threads of zerosock, and of HAProxy: the relay has one core.
const WORKERS: &str = "1";
/// Most connections that a relay is told to allow for one.
const FEW: usize = 1000;
/// Timeout of idle connections in HAProxy, which has no default. Longer than any measurement.
const IDLE: &str = "1h";

/// A relay with its settings.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Relay {
    Zerosock(Way),
    /// Another release, as it decides by itself.
    Release(Binary),
    /// With this buffer, bytes.
    Socat(u32),
    Haproxy {
        splice: bool,
    },
    /// The two programs connected to each other: the ceiling.
    Direct,
}

/// The connections that a relay is to expect.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Load {
    /// One: zerosock logs how it relays it.
    One,
    /// At most so many at a time.
    Many(usize),
}

impl Load {
    fn most(self) -> usize {
        match self {
            Load::One => FEW,
            Load::Many(most) => most,
        }
    }
}

/// Whether a relay that was told to go one way may say that it went `taken`.
pub(super) fn allows(way: Way, taken: &str) -> bool {
    match way {
        Way::Auto => true,
        // Datagrams are copied.
        Way::Copy => taken == "copy" || taken == "messages",
        Way::Splice | Way::Sockmap => taken == way.to_string(),
    }
}

impl Relay {
    /// Name in the tables.
    pub(super) fn title(self) -> String {
        match self {
            Relay::Zerosock(Way::Auto) => "zerosock".to_owned(),
            Relay::Zerosock(way) => format!("zerosock --way {way}"),
            Relay::Release(binary) => binary.title().to_owned(),
            Relay::Socat(buffer) => format!("socat -b {buffer}"),
            Relay::Haproxy { splice: false } => "haproxy".to_owned(),
            Relay::Haproxy { splice: true } => "haproxy, splice-auto".to_owned(),
            Relay::Direct => "direct connection".to_owned(),
        }
    }

    /// Whether it can relay from a socket of this kind.
    pub(super) fn takes(self, from: Kind) -> bool {
        match self {
            // A pipe keeps no bounds of datagrams, and HAProxy relays none.
            Relay::Zerosock(Way::Splice) | Relay::Haproxy { .. } => from != Kind::Udp,
            // The kernel redirects no stream whose source is TCP or Unix.
            Relay::Zerosock(Way::Sockmap) => from == Kind::Udp,
            _ => true,
        }
    }

    /// The command that relays each connection to `from` to a new one to `to`. Files that it needs
    /// are made in `dir`.
    pub(super) fn command(
        self,
        from: &Address,
        to: &Address,
        load: Load,
        dir: &Path,
    ) -> Result<Command, String> {
        match self {
            Relay::Zerosock(way) => zerosock(Binary::OWN, way, from, to, load),
            Relay::Release(binary) => zerosock(binary, Way::Auto, from, to, load),
            Relay::Socat(buffer) => {
                let mut command = Command::new(SOCAT.find()?);
                command.args(["-b", &buffer.to_string()]);
                command.arg(match from {
                    Address::Tcp(address) => format!(
                        "TCP4-LISTEN:{},bind={},reuseaddr,fork,backlog=1024",
                        address.port(),
                        address.ip()
                    ),
                    // One peer: a child for each would not get what arrives while it starts.
                    Address::Udp(address) => format!(
                        "UDP4-LISTEN:{},bind={},reuseaddr",
                        address.port(),
                        address.ip()
                    ),
                    Address::Unix(path) => {
                        format!("UNIX-LISTEN:{},fork,backlog=1024", path.display())
                    }
                });
                command.arg(match to {
                    Address::Tcp(address) => format!("TCP4:{address}"),
                    Address::Udp(address) => format!("UDP4:{address}"),
                    Address::Unix(path) => format!("UNIX-CONNECT:{}", path.display()),
                });
                Ok(command)
            }
            Relay::Haproxy { splice } => {
                let mut command = Command::new(HAPROXY.find()?);
                let file = dir.join("haproxy.cfg");
                fs::write(&file, haproxy_file(from, to, load.most(), splice)?)
                    .map_err(|error| format!("{}: {error}", file.display()))?;
                // -db: in the foreground.
                command.arg("-db").arg("-f").arg(file);
                Ok(command)
            }
            Relay::Direct => Err("no relay".to_owned()),
        }
    }
}

/// `zerosock relay`.
fn zerosock(
    binary: Binary,
    way: Way,
    from: &Address,
    to: &Address,
    load: Load,
) -> Result<Command, String> {
    let mut command = Command::new(binary.path()?);
    command.arg0(COMMAND).arg("relay");
    command.arg(match from {
        Address::Tcp(address) => format!("tcp-listen:{address}"),
        Address::Udp(address) => format!("udp-listen:{address}"),
        Address::Unix(path) => format!("unix-listen:{}", path.display()),
    });
    command.arg(match to {
        Address::Tcp(address) => format!("tcp:{address}"),
        Address::Udp(address) => format!("udp:{address}"),
        Address::Unix(path) => format!("unix:{}", path.display()),
    });
    command.args(["--way", &way.to_string(), "--workers", WORKERS]);
    command.args(["--max-connections", &load.most().to_string()]);
    let level = if load == Load::One { "info" } else { "warn" };
    command.args(["--log-level", level]);
    Ok(command)
}

fn haproxy_file(from: &Address, to: &Address, most: usize, splice: bool) -> Result<String, String> {
    let name = |address: &Address| match address {
        Address::Tcp(address) => Ok(address.to_string()),
        Address::Unix(path) => Ok(format!("unix@{}", path.display())),
        Address::Udp(_) => Err("HAProxy relays no UDP".to_owned()),
    };
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = write!(
        text,
        "global\n    nbthread {WORKERS}\n    maxconn {most}\n\
         defaults\n    mode tcp\n    timeout connect 5s\n    timeout client {IDLE}\n    \
         timeout server {IDLE}\n"
    );
    if splice {
        text.push_str("    option splice-auto\n");
    }
    let (from, to) = (name(from)?, name(to)?);
    let _ = write!(
        text,
        "frontend here\n    bind {from} backlog 4096\n    maxconn {most}\n    \
         default_backend there\n\
         backend there\n    server target {to}\n"
    );
    Ok(text)
}

/// A program of a package of the same name.
struct Peer {
    /// The variable that names it.
    variable: &'static str,
    program: &'static str,
    /// What makes it print its version.
    version: &'static str,
}

const SOCAT: Peer = Peer {
    variable: "SOCAT",
    program: "socat",
    version: "-V",
};
const HAPROXY: Peer = Peer {
    variable: "HAPROXY",
    program: "haproxy",
    version: "-v",
};
const PEERS: [Peer; 2] = [SOCAT, HAPROXY];

impl Peer {
    /// Path of its program; the error says what to do.
    fn find(&self) -> Result<PathBuf, String> {
        install::find_packaged(self.variable, self.program)
    }
}

/// Installs the packages of the peers that are missing, as root or with sudo without a password.
pub(crate) fn install_peers() -> Result<(), String> {
    let missing = PEERS.iter().filter(|peer| peer.find().is_err());
    install::apt_get(&missing.map(|peer| peer.program).collect::<Vec<_>>())
}

/// The name of a program with the version that it prints.
pub(super) fn versions() -> Vec<String> {
    let version = |peer: &Peer| {
        let output = Command::new(peer.find().ok()?)
            .arg(peer.version)
            .output()
            .ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        // `socat version 1.7.4.4 on ...`, and `HAProxy version 2.6.12-1+deb12u1 2023/12/16 - ...`.
        let (_, rest) = text.split_once("version ")?;
        let number = rest.split_whitespace().next()?;
        Some(format!("{} {number}", peer.program))
    };
    PEERS.iter().filter_map(version).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(relay: Relay, from: &Address, to: &Address) -> Vec<String> {
        let command = relay
            .command(from, to, Load::One, Path::new("/nowhere"))
            .unwrap();
        let words = command.get_args().map(|word| word.to_string_lossy());
        words.map(|word| word.into_owned()).collect()
    }

    #[test]
    fn zerosock_is_told_both_ends_the_way_and_its_workers() {
        let tcp = Address::Tcp("127.0.0.1:80".parse().unwrap());
        let unix = Address::Unix("/run/x".into());
        assert_eq!(
            words(Relay::Zerosock(Way::Splice), &tcp, &unix)[..6],
            [
                "relay",
                "tcp-listen:127.0.0.1:80",
                "unix:/run/x",
                "--way",
                "splice",
                "--workers"
            ]
        );
    }

    #[test]
    fn haproxy_relays_connections_and_no_datagrams() {
        let tcp = Address::Tcp("127.0.0.1:80".parse().unwrap());
        let unix = Address::Unix("/run/x".into());
        let text = haproxy_file(&tcp, &unix, 7, true).unwrap();
        for line in [
            "nbthread 1",
            "maxconn 7",
            "mode tcp",
            "option splice-auto",
            "bind 127.0.0.1:80 backlog 4096",
            "server target unix@/run/x",
        ] {
            let found = text.lines().any(|found| found.trim() == line);
            assert!(found, "{line} in {text}");
        }
        let udp = Address::Udp("127.0.0.1:80".parse().unwrap());
        assert!(haproxy_file(&udp, &tcp, 7, false).is_err());
        assert!(!Relay::Haproxy { splice: false }.takes(Kind::Udp));
    }
}
