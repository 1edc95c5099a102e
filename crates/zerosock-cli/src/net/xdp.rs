//! Queues of an interface, by AF_XDP.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::{Arc, Weak};

use zerosock_net::xdp::{Use, XdpBackend, XdpConfig};
use zerosock_sys::tun::InterfaceName;
use zerosock_sys::xdp::{InterfaceOptions, LongFrames, MAX_QUEUES, XdpInterface};

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
pub(super) struct XdpQueueOptions {
    pub(super) queues: u16,
    pub(super) drop_long: bool,
    pub(super) copy: bool,
    /// As the uplink of a switch.
    pub(super) uplink: bool,
}

/// The interfaces of a process that have its program, which the networks on their queues share. An interface
/// stays when its last network ends: another network can have its queues without capabilities.
#[derive(Default)]
pub(crate) struct Interfaces(Vec<Shared>);

/// Queues that no other network of the process gets.
pub(super) type Claim = Arc<Range<u32>>;

struct Shared {
    interface: Arc<XdpInterface>,
    drop_long: bool,
    /// Queues that networks have, as long as they do.
    queues: Vec<Weak<Range<u32>>>,
}

impl Interfaces {
    /// The interface of these queues, with the program attached, and the claim of the queues.
    fn get(
        &mut self,
        first: XdpQueue,
        how: XdpQueueOptions,
    ) -> Result<(Arc<XdpInterface>, Claim), Failure> {
        let failed =
            |reason: &dyn fmt::Display| Failure::runtime(format_args!("xdp {first}: {reason}"));
        // One that was removed and made again has another number.
        self.0.retain(|shared| shared.interface.is_present());
        let queues = Arc::new(first.queue..first.queue + u32::from(how.queues));
        let found = self.0.iter_mut();
        let mut found = found.filter(|shared| shared.interface.name() == first.interface);
        if let Some(shared) = found.next() {
            if shared.drop_long != how.drop_long {
                let kept = shared.drop_long;
                return Err(failed(&format_args!(
                    "the networks of an interface have the same xdp_drop_long, and it cannot change while the \
                     process runs: it stays {kept}; for another value, start anew"
                )));
            }
            shared.queues.retain(|other| other.strong_count() > 0);
            let mut others = shared.queues.iter().filter_map(Weak::upgrade);
            if others.any(|other| other.start < queues.end && queues.start < other.end) {
                return Err(failed(&"another network has a queue of these"));
            }
            shared.queues.push(Arc::downgrade(&queues));
            return Ok((Arc::clone(&shared.interface), queues));
        }
        let options = InterfaceOptions {
            long_frames: match how.drop_long {
                true => LongFrames::Drop,
                false => LongFrames::Pass,
            },
            ..InterfaceOptions::default()
        };
        let interface = XdpInterface::open(&first.interface, options);
        let interface = Arc::new(interface.map_err(|error| failed(&error))?);
        self.0.push(Shared {
            interface: Arc::clone(&interface),
            drop_long: how.drop_long,
            queues: vec![Arc::downgrade(&queues)],
        });
        Ok((interface, queues))
    }
}

/// Finds out whether the queues can be used.
pub(super) fn open(
    first: XdpQueue,
    how: XdpQueueOptions,
    interfaces: &mut Interfaces,
) -> Result<(XdpBackend, Claim), Failure> {
    let failed = |error| Failure::runtime(format_args!("xdp {first}: {error}"));
    let before = interfaces.0.len();
    let (interface, claim) = interfaces.get(first, how)?;
    let config = XdpConfig {
        queue: first.queue,
        queues: how.queues,
        copies: how.copy,
        use_of: match how.uplink {
            true => Use::Uplink,
            false => Use::Guest,
        },
    };
    let backend = XdpBackend::new(interface, config);
    if backend.is_err() {
        // A program that was attached for it goes.
        interfaces.0.truncate(before);
    }
    Ok((backend.map_err(failed)?, claim))
}
