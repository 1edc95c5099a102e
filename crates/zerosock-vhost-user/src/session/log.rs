//! The log of written pages, for live migration: its requests and its checks.
//!
//! A front-end that starts a migration sends SET_LOG_BASE, SET_FEATURES with VHOST_F_LOG_ALL, and
//! SET_VRING_ADDR with VHOST_VRING_F_LOG for each queue, while the queues run. A front-end that starts
//! its queues anew during a migration sends SET_LOG_BASE last.

use std::fmt::Display;
use std::sync::Arc;

use vhost::vhost_user::message::{
    VhostUserLog, VhostUserMsgValidator, VhostUserVringAddr, VhostUserVringAddrFlags,
};
use zerosock_ring::{DirtyLog, LOG_PAGE, RegionConfig};
use zerosock_sys::PeerFd;

use super::super::DeviceCommand;
use super::super::fds::MappedShare;
use super::super::stats::FrontendFault;
use super::arguments::{Arguments, memory_file};
use super::state::{Accepted, Denied, F_LOG_ALL, OnDone, Queue, Session};

/// Maps the log. If LOG_SHMFD was negotiated, the request has a reply: its own payload, as with the
/// back-ends of rust-vmm. QEMU accepts any payload. The reply cannot express failure, so a refusal
/// ends the connection: the front-end must not believe that pages are logged.
pub(super) fn set_log_base(
    session: &mut Session,
    arguments: Arguments<'_>,
) -> Result<Accepted, Denied> {
    let VhostUserLog {
        mmap_size,
        mmap_offset,
    } = arguments.body()?;
    let answer = arguments.payload.to_vec();
    let missing = || (FrontendFault::Descriptors, "no descriptor".into());
    let file = memory_file(arguments.fds.into_iter().next().ok_or_else(missing)?)?;
    let log = Arc::new(session.map_log(&file, mmap_offset, mmap_size)?);
    Ok(Accepted::Command(
        DeviceCommand::SetLog(Arc::clone(&log)),
        OnDone::Log(log, answer),
    ))
}

/// The addresses of a queue that runs cannot change, but how writes into its used ring are logged.
pub(super) fn set_vring_addr(
    session: &mut Session,
    arguments: Arguments<'_>,
) -> Result<Accepted, Denied> {
    let address = arguments.body::<VhostUserVringAddr>()?;
    let index = address.index;
    let addresses = (address.descriptor, address.available, address.used);
    let logged = address.flags & VhostUserVringAddrFlags::VHOST_VRING_F_LOG.bits() != 0;
    let used_log = logged.then_some(address.log);
    let queue = session.queue(index)?.1;
    if queue.started && queue.addresses != Some(addresses) {
        session.stopped_queue(index)?;
    }
    if !address.is_valid() {
        return Err((
            FrontendFault::Payload,
            format!("addresses of queue {index} are not aligned"),
        ));
    }
    let (index, queue) = session.queue(index)?;
    if !queue.started {
        queue.addresses = Some(addresses);
        queue.used_log = used_log;
        return Ok(Accepted::Ack);
    }
    let end = queue.log_end(used_log);
    let same = queue.used_log == used_log;
    if session.is_logging() {
        session.check_log(end)?;
    }
    if same {
        return Ok(Accepted::Ack);
    }
    let command = DeviceCommand::SetUsedLog {
        index,
        guest_addr: used_log,
    };
    Ok(Accepted::Command(command, OnDone::UsedLog(index, used_log)))
}

impl Session {
    /// Whether the front-end has turned on logging.
    pub(super) fn is_logging(&self) -> bool {
        self.features & F_LOG_ALL != 0
    }

    /// Refuses the current log, if there is one, if it has no bit for some page below `end`.
    pub(super) fn check_log(&self, end: u64) -> Result<(), Denied> {
        let log = self.log.as_ref();
        log.map_or(Ok(()), |log| check_end(log, end))
    }

    /// Maps a log of `bytes` bytes at `offset` of the file.
    fn map_log(&self, file: &PeerFd, offset: u64, bytes: u64) -> Result<DirtyLog, Denied> {
        self.check_seal(file, || format!("the log of written pages ({bytes} bytes)"))?;
        let region = RegionConfig {
            guest_addr: 0,
            user_addr: 0,
            len: bytes,
            fd_offset: offset,
        };
        let refused = |error: &dyn Display| {
            let text = format!("the log of {bytes} bytes at offset {offset:#x}: {error}");
            (FrontendFault::Memory, text)
        };
        let mapped = region.mapped_len(0, file).map_err(|e| refused(&e))?;
        let share = MappedShare::take(&self.account, mapped).map_err(|e| refused(&e))?;
        let log = DirtyLog::map(file, offset, bytes, Some(share)).map_err(|e| refused(&e))?;
        let rings = self
            .queues
            .iter()
            .map(|queue| queue.log_end(queue.used_log));
        check_end(&log, rings.fold(self.memory_end, u64::max))?;
        Ok(log)
    }
}

fn check_end(log: &DirtyLog, end: u64) -> Result<(), Denied> {
    if log.covers(end) {
        return Ok(());
    }
    let (bytes, page) = (log.bytes(), end.saturating_sub(1) / LOG_PAGE);
    let text = format!("the log of {bytes} bytes has no bit for page {page:#x}");
    Err((FrontendFault::Memory, text))
}

impl Queue {
    /// The guest address behind the used ring, if it is logged at `used_log`.
    fn log_end(&self, used_log: Option<u64>) -> u64 {
        // virtio 1.2, 2.7.8.
        let len = 6 + 8 * u64::from(self.size.unwrap_or_default());
        used_log.map_or(0, |at| at.saturating_add(len))
    }
}
