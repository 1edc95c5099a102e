//! The networks: a sink that takes pages as they are, and a cable to a receiver.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;

use zerosock_sys::affinity;
use zerosock_sys::network::isolate_thread;

use crate::bench::pair::Cores;

/// What carries the bytes of a measurement.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Carried {
    /// UDP into an `ifb` device, which drops it without looking at it.
    Udp(SocketAddr),
    /// TCP over a veth pair, which copies, to a thread that reads it.
    Tcp(SocketAddr),
}

impl Carried {
    pub(super) fn is_stream(self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    /// A new socket that is connected.
    pub(super) fn socket(self) -> Result<OwnedFd, String> {
        let failed = |error: std::io::Error| format!("a socket: {error}");
        match self {
            Self::Udp(to) => {
                let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
                let socket = UdpSocket::bind(any).map_err(failed)?;
                socket.connect(to).map_err(failed)?;
                Ok(socket.into())
            }
            Self::Tcp(to) => Ok(TcpStream::connect(to).map_err(failed)?.into()),
        }
    }
}

/// What there is to send to.
pub(super) struct Network {
    pub(super) udp4: Carried,
    pub(super) udp6: Carried,
    pub(super) tcp4: Carried,
    pub(super) tcp6: Carried,
}

/// Runs `measure` on a thread in a network of its own, with a receiver in another.
///
/// # Errors
/// Why there can be none.
pub(super) fn with_network<T: Send>(
    cores: Cores,
    measure: impl FnOnce(&Network) -> Result<T, String> + Send,
) -> Result<T, String> {
    thread::scope(|scope| {
        let sending = scope.spawn(move || {
            isolate_thread().map_err(|error| format!("a network namespace: {error}"))?;
            pin(cores.sender)?;
            let listening = far_end(cores.receiver)?;
            for words in [
                "link set lo up",
                "link add sink0 type ifb",
                "addr add 10.9.0.1/24 dev sink0",
                "addr add fd09::1/64 dev sink0 nodad",
                "link set sink0 mtu 65535 up",
                "neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev sink0 nud permanent",
                "neigh add fd09::2 lladdr 02:00:00:00:00:02 dev sink0 nud permanent",
            ] {
                ip(words)?;
            }
            let address = |text: &str| text.parse().map_err(|error| format!("{text}: {error}"));
            measure(&Network {
                udp4: Carried::Udp(address("10.9.0.2:9")?),
                udp6: Carried::Udp(address("[fd09::2]:9")?),
                tcp4: Carried::Tcp(SocketAddr::new([10, 8, 0, 2].into(), listening.0)),
                tcp6: Carried::Tcp(SocketAddr::new(
                    std::net::Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, 2).into(),
                    listening.1,
                )),
            })
        });
        match sending.join() {
            Ok(result) => result,
            Err(_) => Err("the measuring thread panicked".to_owned()),
        }
    })
}

/// Starts a receiver in a namespace of its own, at the other end of a cable, and says where it
/// listens. It ends with the program.
fn far_end(core: Option<usize>) -> Result<(u16, u16), String> {
    let (here, path) = channel();
    let (plug, plugged) = channel();
    let (listen, listening) = channel();
    thread::spawn(move || {
        let begin = || -> Result<(), String> {
            isolate_thread().map_err(|error| format!("a network namespace: {error}"))?;
            pin(core)
        };
        let thread = rustix::thread::gettid().as_raw_nonzero();
        let path = format!("/proc/{}/task/{thread}/ns/net", std::process::id());
        let _ = here.send(begin().map(|()| path));
        let Ok(()) = plugged.recv() else { return };
        let listen_at = || -> Result<Vec<TcpListener>, String> {
            end("far0", 2)?;
            let listeners = ["10.8.0.2:0", "[fd08::2]:0"].map(TcpListener::bind);
            listeners
                .into_iter()
                .map(|listener| listener.map_err(|error| format!("a listener: {error}")))
                .collect()
        };
        let listeners = listen_at();
        let ports = listeners.as_ref().map(|listeners| {
            let ports = listeners.iter().map(|listener| {
                let address = listener.local_addr();
                address.map_or(0, |address| address.port())
            });
            ports.collect::<Vec<u16>>()
        });
        let _ = listen.send(ports.map_err(Clone::clone));
        for listener in listeners.unwrap_or_default() {
            // Its threads stay in this one's namespace, and on its core.
            thread::spawn(move || receive(&listener));
        }
    });
    let gone = |_| "the receiver panicked".to_owned();
    let path = path.recv().map_err(gone)??;
    ip("link add near0 type veth peer name far0")?;
    ip(&format!("link set far0 netns {path}"))?;
    end("near0", 1)?;
    plug.send(())
        .map_err(|_| "the receiver panicked".to_owned())?;
    match listening.recv().map_err(gone)??[..] {
        [four, six] => Ok((four, six)),
        _ => Err("the receiver listens nowhere".to_owned()),
    }
}

fn receive(listener: &TcpListener) {
    let mut bytes = vec![0; 1 << 20];
    while let Ok((mut stream, _)) = listener.accept() {
        while stream.read(&mut bytes).is_ok_and(|count| count > 0) {}
    }
}

fn end(device: &str, number: u8) -> Result<(), String> {
    ip(&format!("addr add 10.8.0.{number}/24 dev {device}"))?;
    ip(&format!("addr add fd08::{number}/64 dev {device} nodad"))?;
    ip(&format!("link set {device} up"))
}

fn pin(core: Option<usize>) -> Result<(), String> {
    let Some(core) = core else { return Ok(()) };
    affinity::pin_current_thread(core).map_err(|error| format!("core {core}: {error}"))
}

/// Runs ip(8) with these words.
fn ip(words: &str) -> Result<(), String> {
    let output = Command::new("ip")
        .args(words.split(' '))
        .output()
        .map_err(|error| format!("ip(8): {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    Err(format!("ip {words}: {}", told.trim()))
}
