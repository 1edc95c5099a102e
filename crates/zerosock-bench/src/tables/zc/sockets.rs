//! The networks: a sink that drops pages unread, and a veth pair to a receiver.

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;

use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{RecvFlags, recv};
use zerosock_sys::network::isolate_thread;

use crate::namespace::{self, ip, run};
use crate::pair::Cores;
use crate::processes::on_core;
use crate::worker;

/// Transport of a measurement.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Carried {
    /// UDP into an `ifb` device, which drops it unread.
    Udp(SocketAddr),
    /// TCP over a veth pair to a receiving thread. The receiving side of the pair copies.
    Tcp(SocketAddr),
}

impl Carried {
    pub(super) fn is_stream(self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    pub(super) fn to(self) -> SocketAddr {
        match self {
            Self::Udp(to) | Self::Tcp(to) => to,
        }
    }

    /// A new connected socket.
    pub(super) fn socket(self) -> Result<OwnedFd, String> {
        let failed = |error: std::io::Error| format!("a socket: {error}");
        match self {
            Self::Udp(to) => {
                let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
                let socket = UdpSocket::bind(any).map_err(failed)?;
                socket.connect(to).map_err(failed)?;
                Ok(socket.into())
            }
            Self::Tcp(to) => {
                let socket = TcpStream::connect(to).map_err(failed)?;
                // As in the kernel's own test programs.
                set_socket_send_buffer_size(&socket, 1 << 21)
                    .map_err(|error| failed(error.into()))?;
                Ok(socket.into())
            }
        }
    }
}

/// The destinations.
pub(super) struct Network {
    pub(super) udp4: Carried,
    pub(super) udp6: Carried,
    pub(super) tcp4: Carried,
    pub(super) tcp6: Carried,
    /// Why packets from the veth pair are not processed on the receiver's core.
    pub(super) unsteered: Option<String>,
}

/// The listeners at the other end of the veth pair: ports for IPv4 and IPv6, and as in [`Network`].
struct Far {
    ports: (u16, u16),
    unsteered: Option<String>,
}

/// Runs `measure` on a thread in a new network namespace, with a receiver in another one.
///
/// # Errors
/// Why the namespaces cannot be made.
pub(super) fn with_network<T: Send>(
    cores: Cores,
    measure: impl FnOnce(&Network) -> Result<T, String> + Send,
) -> Result<T, String> {
    on_core(cores.sender, || {
        namespace::enter()?;
        let far = far_end(cores)?;
        for words in [
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
            tcp4: Carried::Tcp(SocketAddr::new([10, 8, 0, 2].into(), far.ports.0)),
            tcp6: Carried::Tcp(SocketAddr::new(
                std::net::Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, 2).into(),
                far.ports.1,
            )),
            unsteered: far.unsteered,
        })
    })
}

/// Starts a receiver in a new network namespace, at the other end of a veth pair, and returns its
/// ports. It ends with the program.
fn far_end(cores: Cores) -> Result<Far, String> {
    let (here, path) = channel();
    let (plug, plugged) = channel();
    let (listen, listening) = channel();
    thread::spawn(move || {
        let begin = || -> Result<(), String> {
            isolate_thread().map_err(|error| format!("a network namespace: {error}"))?;
            worker::pin(cores.receiver)
        };
        let thread = rustix::thread::gettid().as_raw_nonzero();
        let path = format!("/proc/{}/task/{thread}/ns/net", std::process::id());
        let _ = here.send(begin().map(|()| path));
        let Ok(()) = plugged.recv() else { return };
        let listen_at = |address: &str| {
            let failed = |error| format!("a listener: {error}");
            let listener = TcpListener::bind(address).map_err(failed)?;
            let port = listener.local_addr().map_err(failed)?.port();
            Ok::<_, String>((listener, port))
        };
        let begin = || -> Result<_, String> {
            end("far0", 2)?;
            let (four, six) = (listen_at("10.8.0.2:0")?, listen_at("[fd08::2]:0")?);
            let far = Far {
                ports: (four.1, six.1),
                unsteered: steer("far0", cores.receiver).err(),
            };
            Ok((far, [four.0, six.0]))
        };
        let (far, listeners) = match begin() {
            Ok((far, listeners)) => (Ok(far), listeners.into()),
            Err(reason) => (Err(reason), Vec::new()),
        };
        let _ = listen.send(far);
        for listener in listeners {
            // Its threads inherit this thread's namespace and core.
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
    let far = listening.recv().map_err(gone)??;
    Ok(Far {
        unsteered: far.unsteered.or(steer("near0", cores.sender).err()),
        ..far
    })
}

/// Receives everything without copying it out (MSG_TRUNC), as the kernel's own test program does.
fn receive(listener: &TcpListener) {
    let mut room = vec![0; 1 << 21];
    while let Ok((stream, _)) = listener.accept() {
        let mut take = || recv(&stream, &mut room[..], RecvFlags::TRUNC);
        while take().is_ok_and(|(_, count)| count > 0) {}
    }
}

fn end(device: &str, number: u8) -> Result<(), String> {
    ip(&format!("addr add 10.8.0.{number}/24 dev {device}"))?;
    ip(&format!("addr add fd08::{number}/64 dev {device} nodad"))?;
    ip(&format!("link set {device} up"))
}

/// Has incoming packets of this device processed on one core (receive packet steering). Without it
/// the sender's core would also do the receiver's work for packets sent over a veth pair, copies
/// included, which no sender to another machine does.
fn steer(device: &str, core: Option<usize>) -> Result<(), String> {
    let Some(core) = core.filter(|&core| core < 32) else {
        return Ok(());
    };
    // /sys shows the network namespace in which it was mounted.
    let set = format!(
        "mount -t sysfs sysfs /sys && echo {:x} > /sys/class/net/{device}/queues/rx-0/rps_cpus",
        1u32 << core
    );
    run(Command::new("unshare").args(["--mount", "sh", "-ec", &set]))
        .map_err(|told| format!("{device} to core {core}: {told}"))
}
