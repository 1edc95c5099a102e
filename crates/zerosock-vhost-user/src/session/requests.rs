//! The known requests: one table, and a handler for each.
//!
//! A rule says which protocol feature must have been negotiated, the length of the payload, the
//! number of descriptors, and whether the request has a reply of its own. A handler runs after
//! these checks; it changes the session only if it accepts the request. Quotations are from the
//! vhost-user specification.

use std::sync::Arc;

use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfig, VhostUserLog, VhostUserMemory, VhostUserMemoryRegion,
    VhostUserProtocolFeatures as Protocol, VhostUserSingleMemoryRegion, VhostUserU64,
    VhostUserVirtioFeatures, VhostUserVringAddr, VhostUserVringState,
};
use vm_memory::ByteValued;
use zerosock_ring::{QueueConfig, RegionConfig};
use zerosock_sys::PeerFd;
use zerosock_sys::notify::CallFd;

use super::super::DeviceCommand;
use super::super::codec::MAX_PAYLOAD;
use super::super::fds::SentFd;
use super::super::model::ConfigWrite;
use super::super::stats::FrontendFault;
use super::arguments::{Arguments, body, memory_file};
use super::log::{set_log_base, set_vring_addr};
use super::network::{send_rarp, set_mtu};
use super::state::{
    Accepted, Denied, F_EVENT_IDX, F_INDIRECT_DESC, F_LOG_ALL, OnDone, Queue, Session, Slot,
};
use super::status::{get_status, set_status};

/// The most memory regions that are accepted: the maximum of QEMU.
const MAX_SLOTS: usize = 32;

/// "A back-end can signal the descriptor's absence": bit 8 of the payload of KICK, CALL and ERR.
pub(super) const NO_FD: u64 = 1 << 8;

type Handler = fn(&mut Session, Arguments<'_>) -> Result<Accepted, Denied>;

/// The checks and the handler of a request.
pub(super) struct Rule {
    request: FrontendReq,
    /// The protocol feature that must have been negotiated.
    pub(super) feature: Protocol,
    /// Shortest and longest payload in bytes.
    payload: (usize, usize),
    /// Fewest and most descriptors.
    fds: (usize, usize),
    /// The request has a reply of its own, for which the front-end waits.
    pub(super) answered: bool,
    /// A refusal that the front-end cannot be told of ends the connection.
    pub(super) must_hold: bool,
    pub(super) handler: Handler,
}

impl Rule {
    const fn new(request: FrontendReq, payload: usize, handler: Handler) -> Rule {
        let payload = (payload, payload);
        Rule {
            request,
            feature: Protocol::empty(),
            payload,
            fds: (0, 0),
            answered: false,
            must_hold: false,
            handler,
        }
    }

    const fn answered(self) -> Rule {
        Rule {
            answered: true,
            ..self
        }
    }

    const fn must_hold(self) -> Rule {
        Rule {
            must_hold: true,
            ..self
        }
    }

    const fn feature(self, feature: Protocol) -> Rule {
        Rule { feature, ..self }
    }

    const fn fds(self, fewest: usize, most: usize) -> Rule {
        Rule {
            fds: (fewest, most),
            ..self
        }
    }

    const fn or_longer(self) -> Rule {
        Rule {
            payload: (self.payload.0, MAX_PAYLOAD),
            ..self
        }
    }

    /// The rule for a request, if it is known.
    pub(super) fn of(request: u32) -> Option<&'static Rule> {
        let known = FrontendReq::try_from(request).ok()?;
        RULES.iter().find(|rule| rule.request == known)
    }

    /// Whether the request can come with descriptors.
    pub(super) fn takes_fds(&self) -> bool {
        self.fds.1 > 0
    }

    /// Checks what can be checked without the session.
    pub(super) fn check(&self, payload: &[u8], fds: &[SentFd]) -> Result<(), Denied> {
        let (shortest, longest) = self.payload;
        if payload.len() < shortest || payload.len() > longest {
            let text = format!("a payload of {} bytes instead of {shortest}", payload.len());
            return Err((FrontendFault::Payload, text));
        }
        let (fewest, most) = self.fds;
        if fds.len() < fewest || fds.len() > most {
            let text = format!("{} descriptors instead of {fewest} to {most}", fds.len());
            return Err((FrontendFault::Descriptors, text));
        }
        Ok(())
    }
}

const U64: usize = size_of::<VhostUserU64>();
const STATE: usize = size_of::<VhostUserVringState>();
const REGION: usize = size_of::<VhostUserMemoryRegion>();
const SINGLE_REGION: usize = size_of::<VhostUserSingleMemoryRegion>();

/// The known requests. All others are refused.
const RULES: &[Rule] = &[
    Rule::new(FrontendReq::GET_FEATURES, 0, get_features).answered(),
    // A driver with other features than the device would send and receive other frames.
    Rule::new(FrontendReq::SET_FEATURES, U64, set_features).must_hold(),
    Rule::new(FrontendReq::SET_OWNER, 0, set_owner),
    Rule::new(FrontendReq::RESET_OWNER, 0, ignore),
    Rule::new(FrontendReq::GET_PROTOCOL_FEATURES, 0, get_protocol_features).answered(),
    Rule::new(
        FrontendReq::SET_PROTOCOL_FEATURES,
        U64,
        set_protocol_features,
    ),
    Rule::new(FrontendReq::GET_QUEUE_NUM, 0, get_queue_num)
        .feature(Protocol::MQ)
        .answered(),
    // User-mode Linux always sends the table in full length.
    Rule::new(
        FrontendReq::SET_MEM_TABLE,
        size_of::<VhostUserMemory>(),
        set_mem_table,
    )
    .or_longer()
    .fds(1, MAX_SLOTS),
    Rule::new(FrontendReq::GET_MAX_MEM_SLOTS, 0, get_max_mem_slots)
        .feature(Protocol::CONFIGURE_MEM_SLOTS)
        .answered(),
    Rule::new(FrontendReq::ADD_MEM_REG, SINGLE_REGION, add_mem_reg)
        .feature(Protocol::CONFIGURE_MEM_SLOTS)
        .fds(1, 1),
    // "The back-end should accept messages with one file descriptor" for the sake of front-ends
    // that send it.
    Rule::new(FrontendReq::REM_MEM_REG, SINGLE_REGION, rem_mem_reg)
        .feature(Protocol::CONFIGURE_MEM_SLOTS)
        .fds(0, 1),
    // Answered if LOG_SHMFD is negotiated, and refused otherwise.
    Rule::new(
        FrontendReq::SET_LOG_BASE,
        size_of::<VhostUserLog>(),
        set_log_base,
    )
    .feature(Protocol::LOG_SHMFD)
    .fds(1, 1)
    .answered(),
    // The descriptor would signal writes to the log; no front-end needs that, and it is closed.
    Rule::new(FrontendReq::SET_LOG_FD, 0, ignore)
        .or_longer()
        .fds(0, 1),
    Rule::new(FrontendReq::SET_VRING_NUM, STATE, set_vring_num),
    Rule::new(
        FrontendReq::SET_VRING_ADDR,
        size_of::<VhostUserVringAddr>(),
        set_vring_addr,
    ),
    Rule::new(FrontendReq::SET_VRING_BASE, STATE, set_vring_base),
    Rule::new(FrontendReq::GET_VRING_BASE, STATE, get_vring_base).answered(),
    Rule::new(FrontendReq::SET_VRING_KICK, U64, set_vring_kick).fds(0, 1),
    Rule::new(FrontendReq::SET_VRING_CALL, U64, set_vring_call).fds(0, 1),
    Rule::new(FrontendReq::SET_VRING_ERR, U64, set_vring_err).fds(0, 1),
    Rule::new(FrontendReq::SET_VRING_ENABLE, STATE, set_vring_enable),
    Rule::new(
        FrontendReq::GET_CONFIG,
        size_of::<VhostUserConfig>(),
        get_config,
    )
    .feature(Protocol::CONFIG)
    .or_longer()
    .answered(),
    Rule::new(
        FrontendReq::SET_CONFIG,
        size_of::<VhostUserConfig>(),
        set_config,
    )
    .feature(Protocol::CONFIG)
    .or_longer(),
    Rule::new(FrontendReq::SET_BACKEND_REQ_FD, 0, set_backend_req_fd)
        .feature(Protocol::BACKEND_REQ)
        .fds(1, 1),
    Rule::new(FrontendReq::RESET_DEVICE, 0, reset_device).feature(Protocol::RESET_DEVICE),
    Rule::new(FrontendReq::SEND_RARP, U64, send_rarp).feature(Protocol::RARP),
    Rule::new(FrontendReq::NET_SET_MTU, U64, set_mtu).feature(Protocol::MTU),
    Rule::new(FrontendReq::SET_STATUS, U64, set_status).feature(Protocol::STATUS),
    Rule::new(FrontendReq::GET_STATUS, 0, get_status)
        .feature(Protocol::STATUS)
        .answered(),
];

fn answer(body: impl ByteValued) -> Result<Accepted, Denied> {
    Ok(Accepted::Answer(body.as_slice().to_vec()))
}

fn ignore(_: &mut Session, _: Arguments<'_>) -> Result<Accepted, Denied> {
    Ok(Accepted::Ack)
}

fn get_features(session: &mut Session, _: Arguments<'_>) -> Result<Accepted, Denied> {
    answer(VhostUserU64::new(session.offered()))
}

fn set_features(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let features = arguments.u64()?;
    let checked = session.check_features(features);
    session.features_refused = checked.is_err();
    checked?;
    let changed = features ^ session.features;
    if session.any_started() {
        match changed {
            0 => return Ok(Accepted::Ack),
            // A migration begins or ends.
            F_LOG_ALL => session.check_log(session.memory_end)?,
            _ => return Err((FrontendFault::Order, "a queue runs".into())),
        }
    }
    Ok(Accepted::Command(
        DeviceCommand::SetFeatures(features),
        OnDone::Features(features),
    ))
}

fn set_owner(session: &mut Session, _: Arguments<'_>) -> Result<Accepted, Denied> {
    session.has_owner = true;
    Ok(Accepted::Ack)
}

/// Keeps a socket that can only be written to; drops any other descriptor.
fn set_backend_req_fd(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let channel = arguments.fds.into_iter().next();
    if let Some(SentFd::Pipe(_) | SentFd::Socket(_)) = channel {
        session.backend_channel = channel;
    }
    Ok(Accepted::Ack)
}

fn get_protocol_features(session: &mut Session, _: Arguments<'_>) -> Result<Accepted, Denied> {
    answer(VhostUserU64::new(session.offered_protocol().bits()))
}

fn set_protocol_features(
    session: &mut Session,
    arguments: Arguments<'_>,
) -> Result<Accepted, Denied> {
    let bits = arguments.u64()?;
    // A front-end may have asked for the features before it sent SET_OWNER.
    let unknown = bits & !(session.offered_protocol() | Protocol::BACKEND_REQ).bits();
    if unknown != 0 {
        let text = format!("protocol features {unknown:#x} were not offered");
        return Err((FrontendFault::Unsupported, text));
    }
    session.protocol = Protocol::from_bits_truncate(bits);
    Ok(Accepted::Ack)
}

fn get_queue_num(session: &mut Session, _: Arguments<'_>) -> Result<Accepted, Denied> {
    answer(VhostUserU64::new(session.model.announced_queues().into()))
}

fn region(region: &VhostUserMemoryRegion) -> RegionConfig {
    RegionConfig {
        guest_addr: region.guest_phys_addr,
        user_addr: region.user_addr,
        len: region.memory_size,
        fd_offset: region.mmap_offset,
    }
}

fn set_mem_table(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let count = arguments.body::<VhostUserMemory>()?.num_regions;
    let files = arguments.fds.len();
    if usize::try_from(count) != Ok(files) {
        return Err((
            FrontendFault::Descriptors,
            format!("{count} regions, but {files} descriptors"),
        ));
    }
    let table = arguments
        .payload
        .get(size_of::<VhostUserMemory>()..)
        .unwrap_or_default();
    let mut slots = Vec::with_capacity(files);
    for (entry, file) in table.chunks_exact(REGION).zip(arguments.fds) {
        slots.push(Slot {
            file: memory_file(file)?,
            region: region(&body(entry)?),
        });
    }
    if slots.len() != files {
        return Err((
            FrontendFault::Payload,
            format!("{count} regions, but room for {}", slots.len()),
        ));
    }
    session.map(slots)
}

fn get_max_mem_slots(_: &mut Session, _: Arguments<'_>) -> Result<Accepted, Denied> {
    answer(VhostUserU64::new(MAX_SLOTS as u64))
}

fn add_mem_reg(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let region = region(&*arguments.body::<VhostUserSingleMemoryRegion>()?);
    if session.slots.len() >= MAX_SLOTS {
        return Err((
            FrontendFault::Memory,
            format!("all {MAX_SLOTS} slots are taken"),
        ));
    }
    let mut slots = session.slots.clone();
    for fd in arguments.fds {
        let file = memory_file(fd)?;
        slots.push(Slot { file, region });
    }
    session.map(slots)
}

fn rem_mem_reg(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let gone = region(&*arguments.body::<VhostUserSingleMemoryRegion>()?);
    // "The memory region to be removed is identified by its guest address, user address and
    // size."
    let same = |slot: &Slot| {
        let have = &slot.region;
        (have.guest_addr, have.user_addr, have.len) == (gone.guest_addr, gone.user_addr, gone.len)
    };
    let mut slots = session.slots.clone();
    let before = slots.len();
    slots.retain(|slot| !same(slot));
    if slots.len() == before {
        let text = format!("no region of {} bytes at {:#x}", gone.len, gone.guest_addr);
        return Err((FrontendFault::Memory, text));
    }
    session.map(slots)
}

fn set_vring_num(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let state = arguments.body::<VhostUserVringState>()?;
    let (index, size, most) = (state.index, state.num, session.max_queue_size);
    let queue = session.stopped_queue(index)?;
    match u16::try_from(size) {
        Ok(size) if size.is_power_of_two() && size <= most => {
            queue.size = Some(size);
            Ok(Accepted::Ack)
        }
        _ => {
            let text = format!("queue {index} of {size} entries: not a power of two up to {most}");
            Err((FrontendFault::Payload, text))
        }
    }
}

fn set_vring_base(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let state = arguments.body::<VhostUserVringState>()?;
    let (index, base) = (state.index, state.num);
    let queue = session.stopped_queue(index)?;
    queue.base = u16::try_from(base).map_err(|_| {
        (
            FrontendFault::Payload,
            format!("base {base} of queue {index}: has 16 bits"),
        )
    })?;
    Ok(Accepted::Ack)
}

fn get_vring_base(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let index = arguments.body::<VhostUserVringState>()?.index;
    let (index, queue) = session.queue(index)?;
    if queue.started {
        return Ok(Accepted::Command(
            DeviceCommand::StopQueue { index },
            OnDone::Stop(index),
        ));
    }
    answer(VhostUserVringState::new(index.into(), queue.base.into()))
}

/// The queue and the descriptor of a KICK, CALL or ERR request; `kind` converts the descriptor.
fn notifier(
    arguments: Arguments<'_>,
    kind: fn(SentFd) -> Result<PeerFd, String>,
) -> Result<(u32, Option<PeerFd>), Denied> {
    let value = arguments.u64()?;
    let fd = arguments.fds.into_iter().next();
    if fd.is_some() == (value & NO_FD != 0) {
        return Err((
            FrontendFault::Descriptors,
            "the descriptor does not match the message".into(),
        ));
    }
    let fd = fd.map(kind).transpose();
    let fd = fd.map_err(|text| (FrontendFault::Descriptors, text))?;
    // Bits above NO_FD make the number larger than any queue index.
    let index = u32::try_from(value & !NO_FD).unwrap_or(u32::MAX);
    Ok((index, fd))
}

/// Starts the queue. The specification requires it on the first kick; the driver may have made
/// buffers available earlier, so the queue starts as soon as its kick descriptor arrives.
fn set_vring_kick(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let (index, kick) = notifier(arguments, SentFd::eventfd)?;
    let negotiated = session.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0;
    let (has_memory, features) = (session.has_memory, session.features);
    session.stopped_queue(index)?;
    // A driver may have accepted none.
    session.model.check_features(features)?;
    let (index, queue) = session.queue(index)?;
    let Some(kick) = kick else {
        let text = format!("queue {index} without a kick descriptor: we do not poll rings");
        return Err((FrontendFault::Unsupported, text));
    };
    let incomplete = |what: &str| {
        (
            FrontendFault::Order,
            format!("queue {index} is started before {what}"),
        )
    };
    let size = queue.size.ok_or_else(|| incomplete("its size is set"))?;
    let (desc, avail, used) = queue
        .addresses
        .ok_or_else(|| incomplete("its addresses are set"))?;
    if !has_memory {
        let text = format!(
            "queue {index} is started, and there is no memory: it is not shared; with QEMU add \
             -object memory-backend-memfd,id=mem,size=SIZE,share=on -numa node,memdev=mem"
        );
        return Err((FrontendFault::Order, text));
    }
    let config = QueueConfig {
        size,
        desc,
        avail,
        used,
        base: queue.base,
        event_idx: features & F_EVENT_IDX != 0,
        indirect: features & F_INDIRECT_DESC != 0,
    };
    if let Some(other) = session.started_over(index, &config) {
        let text = format!("the rings of queue {index} overlap with those of queue {other}");
        return Err((FrontendFault::Payload, text));
    }
    let queue = session.queue(index.into())?.1;
    let command = DeviceCommand::StartQueue {
        index,
        config,
        kick,
        call: queue.call.clone(),
        err: queue.err.clone(),
        used_log: queue.used_log,
        // "Ring states": without the protocol features a ring that is started is enabled.
        enabled: queue.enabled || !negotiated,
        start: session.number,
    };
    Ok(Accepted::Command(command, OnDone::Start(index)))
}

fn set_vring_call(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let (index, call) = notifier(arguments, SentFd::call)?;
    set_notifier(
        session,
        index,
        call,
        |queue| &mut queue.call,
        |index, call| DeviceCommand::SetCall { index, call },
    )
}

fn set_vring_err(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let (index, err) = notifier(arguments, SentFd::eventfd)?;
    set_notifier(
        session,
        index,
        err,
        |queue| &mut queue.err,
        |index, err| DeviceCommand::SetErr { index, err },
    )
}

/// Stores a descriptor that the device writes to, and gives it to the device if the queue runs.
fn set_notifier(
    session: &mut Session,
    index: u32,
    fd: Option<PeerFd>,
    place: fn(&mut Queue) -> &mut Option<CallFd>,
    command: fn(u16, Option<CallFd>) -> DeviceCommand,
) -> Result<Accepted, Denied> {
    let call = fd.map(|fd| CallFd::new(fd, session.call_thread.clone()));
    let call = call
        .transpose()
        .map_err(|error| (FrontendFault::Descriptors, error.to_string()))?;
    let (index, queue) = session.queue(index)?;
    place(queue).clone_from(&call);
    match queue.started {
        true => Ok(Accepted::Command(command(index, call), OnDone::Nothing)),
        false => Ok(Accepted::Ack),
    }
}

fn set_vring_enable(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let state = arguments.body::<VhostUserVringState>()?;
    let enabled = match state.num {
        0 => false,
        1 => true,
        other => {
            return Err((
                FrontendFault::Payload,
                format!("neither 0 nor 1, but {other}"),
            ));
        }
    };
    let features = session.features;
    let (index, queue) = session.queue(state.index)?;
    // QEMU may send this before SET_FEATURES: the state counts when the queue is started.
    let negotiated = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    if features & negotiated == 0 && (features != 0 || queue.started) {
        return Err((
            FrontendFault::Order,
            "needs VHOST_USER_F_PROTOCOL_FEATURES in SET_FEATURES".into(),
        ));
    }
    if queue.started && queue.enabled != enabled {
        let command = DeviceCommand::EnableQueue { index, enabled };
        return Ok(Accepted::Command(command, OnDone::Enable(index, enabled)));
    }
    queue.enabled = enabled;
    Ok(Accepted::Ack)
}

/// A range beyond the configuration space is answered with a size of zero, "to indicate an error".
fn get_config(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let mut head = arguments.body::<VhostUserConfig>()?;
    let range = usize::try_from(head.offset)
        .ok()
        .zip(usize::try_from(head.size).ok())
        .and_then(|(offset, size)| session.config.get(offset..offset.checked_add(size)?));
    let bytes = range.unwrap_or_default();
    if bytes.is_empty() {
        head.size = 0;
    }
    let mut reply = head.as_slice().to_vec();
    reply.extend_from_slice(bytes);
    Ok(Accepted::Answer(reply))
}

fn set_config(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let head = arguments.body::<VhostUserConfig>()?;
    let bytes = arguments.payload.get(size_of::<VhostUserConfig>()..);
    let bytes = bytes.unwrap_or_default();
    let size = head.size;
    if usize::try_from(size) != Ok(bytes.len()) {
        let text = format!("{} bytes, but a size of {size}", bytes.len());
        return Err((FrontendFault::Payload, text));
    }
    let mut config = session.config.to_vec();
    let write = ConfigWrite {
        features: session.features,
        running: session.any_started(),
        offset: usize::try_from(head.offset).unwrap_or(usize::MAX),
        bytes,
    };
    session.model.write_config(&mut config, write)?;
    let config: Arc<[u8]> = config.into();
    Ok(Accepted::Command(
        DeviceCommand::SetConfig(Arc::clone(&config)),
        OnDone::Config(config),
    ))
}

fn reset_device(_: &mut Session, _: Arguments<'_>) -> Result<Accepted, Denied> {
    Ok(Accepted::Command(DeviceCommand::ResetDevice, OnDone::Reset))
}
