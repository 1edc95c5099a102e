//! Queues of an interface, by AF_XDP.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use zerosock_net::xdp::{Use, XdpBackend, XdpConfig};
use zerosock_sys::tun::InterfaceName;
use zerosock_sys::xdp::{Interface, LongFrames, MAX_QUEUES, Options};

use crate::failure::Failure;

/// An interface, and the first of its queues.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct XdpQueue {
    pub(crate) interface: InterfaceName,
    pub(crate) queue: u32,
}

impl FromStr for XdpQueue {
    type Err = String;

    /// `IFACE[:QUEUE]`.
    fn from_str(text: &str) -> Result<XdpQueue, String> {
        let (name, queue) = text.split_once(':').unwrap_or((text, "0"));
        let queue = queue.parse().ok().filter(|queue| *queue < MAX_QUEUES);
        let wrong = || format!("`{text}`: give IFACE[:QUEUE], with a queue from 0 to 255");
        Ok(XdpQueue {
            interface: name.parse().map_err(|error| format!("`{name}`: {error}"))?,
            queue: queue.ok_or_else(wrong)?,
        })
    }
}

impl fmt::Display for XdpQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.interface, self.queue)
    }
}

/// How the queues are used.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    pub(super) queues: u16,
    pub(super) drop_long: bool,
    pub(super) copy: bool,
    /// As the uplink of a switch.
    pub(super) uplink: bool,
}

/// The interfaces of a process that have its program, which the networks on their queues share.
#[derive(Default)]
pub(crate) struct Interfaces(Vec<Shared>);

struct Shared {
    interface: Arc<Interface>,
    drop_long: bool,
    /// Queues that networks have.
    queues: Vec<Range<u32>>,
}

impl Interfaces {
    /// The interface of these queues, with the program attached.
    fn get(&mut self, first: XdpQueue, how: How) -> Result<Arc<Interface>, Failure> {
        let failed =
            |reason: &dyn fmt::Display| Failure::runtime(format_args!("xdp {first}: {reason}"));
        let queues = first.queue..first.queue + u32::from(how.queues);
        let found = self.0.iter_mut();
        let mut found = found.filter(|shared| shared.interface.name() == first.interface);
        if let Some(shared) = found.next() {
            let overlaps =
                |other: &Range<u32>| other.start < queues.end && queues.start < other.end;
            if shared.queues.iter().any(overlaps) {
                return Err(failed(&"another network has a queue of these"));
            }
            if shared.drop_long != how.drop_long {
                return Err(failed(
                    &"the networks of an interface have the same xdp_drop_long",
                ));
            }
            shared.queues.push(queues);
            return Ok(Arc::clone(&shared.interface));
        }
        let options = Options {
            long_frames: match how.drop_long {
                true => LongFrames::Drop,
                false => LongFrames::Pass,
            },
            ..Options::default()
        };
        let interface = Interface::open(&first.interface, options);
        let interface = Arc::new(interface.map_err(|error| failed(&error))?);
        self.0.push(Shared {
            interface: Arc::clone(&interface),
            drop_long: how.drop_long,
            queues: vec![queues],
        });
        Ok(interface)
    }
}

/// Finds out whether the queues can be used.
pub(super) fn open(
    first: XdpQueue,
    how: How,
    interfaces: &mut Interfaces,
) -> Result<XdpBackend, Failure> {
    let failed = |error| Failure::runtime(format_args!("xdp {first}: {error}"));
    let interface = interfaces.get(first, how)?;
    let config = XdpConfig {
        queue: first.queue,
        queues: how.queues,
        copies: how.copy,
        use_of: match how.uplink {
            true => Use::Uplink,
            false => Use::Guest,
        },
    };
    XdpBackend::new(interface, config).map_err(failed)
}
