//! A worker with devices, of which each has a driver that does anything with its memory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use rustix::event::{EventfdFlags, eventfd};
use zerosock_ring::{DriverLayout, Memory, QueueConfig};
use zerosock_vhost_user::{DeviceCommand, DeviceReply, Reply};
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::worker::Worker;

use crate::{memory_file, number};

/// Descriptors of a queue.
const SIZE: u16 = 16;
/// Bytes between the rings of two queues.
const RING: u64 = 0x1000;
/// Where buffers lie, behind the rings.
const BUFFERS: u64 = 0x4000;
const LEN: u64 = 0x1_0000;
/// Devices of a worker, and queues of each.
const DEVICES: usize = 2;
const QUEUES: usize = 3;
/// Turns that a worker may need until nothing is left to do.
const TURNS: usize = 1000;

static GUESTS: LazyLock<[(File, Arc<Memory>); DEVICES]> = LazyLock::new(|| {
    [(); DEVICES].map(|()| {
        let file = memory_file(LEN);
        let memory = Memory::of_file(&file, LEN).unwrap();
        (file.into(), Arc::new(memory))
    })
});

/// See the module.
pub struct Lab<D: WorkerDevice> {
    pub worker: Worker<D>,
    /// The available index of each queue.
    avail: [[u16; QUEUES]; DEVICES],
    /// Each device has a command that it has not answered.
    pending: [Arc<AtomicBool>; DEVICES],
    /// Queues that run. A control thread starts no other, and stops and enables no others.
    running: [[Arc<AtomicBool>; QUEUES]; DEVICES],
    /// The place of the next packet.
    next: [u64; DEVICES],
}

fn layout(queue: usize) -> DriverLayout {
    DriverLayout::at(RING * queue as u64, SIZE)
}

impl<D: WorkerDevice> Lab<D> {
    /// A worker with devices 0 and 1. Their queues run.
    pub fn new(worker: Worker<D>, features: u64) -> Lab<D> {
        for (file, _) in &*GUESTS {
            file.write_all_at(&[0; 0x8000], 0).unwrap();
        }
        let mut lab = Lab {
            worker,
            avail: Default::default(),
            pending: Default::default(),
            running: Default::default(),
            next: [BUFFERS; DEVICES],
        };
        lab.worker.start().unwrap();
        for guest in 0..DEVICES {
            lab.command(guest, DeviceCommand::SetFeatures(features));
            lab.command(guest, DeviceCommand::SetMemory(GUESTS[guest].1.clone()));
            for queue in 0..QUEUES {
                lab.start(guest, queue, 0);
            }
        }
        lab
    }

    fn start(&mut self, guest: usize, queue: usize, base: u16) {
        if self.is_running(guest, queue) {
            return;
        }
        let DriverLayout {
            size,
            desc,
            avail,
            used,
        } = layout(queue);
        let config = QueueConfig {
            size,
            desc,
            avail,
            used,
            base,
            event_idx: queue == 1,
            indirect: true,
        };
        let start = DeviceCommand::StartQueue {
            index: queue as u16,
            config,
            kick: eventfd(0, EventfdFlags::CLOEXEC).unwrap().into(),
            call: None,
            err: None,
            used_log: None,
            enabled: true,
            start: 0,
        };
        self.command(guest, start);
    }

    fn is_running(&self, guest: usize, queue: usize) -> bool {
        self.running[guest][queue].load(Ordering::Relaxed)
    }

    /// Gives a command to a device, if it has answered the one before.
    fn command(&mut self, guest: usize, command: DeviceCommand) {
        let pending = self.pending[guest].clone();
        let disconnects = matches!(command, DeviceCommand::Disconnected);
        if pending.swap(true, Ordering::Relaxed) && !disconnects {
            return;
        }
        let queues = match &command {
            DeviceCommand::StartQueue { index, .. } => vec![(usize::from(*index), true)],
            DeviceCommand::StopQueue { index } => vec![(usize::from(*index), false)],
            DeviceCommand::ResetDevice | DeviceCommand::Disconnected => {
                (0..QUEUES).map(|queue| (queue, false)).collect()
            }
            _ => vec![],
        };
        let running = self.running[guest].clone();
        let reply = Reply::to(move |reply| {
            pending.store(false, Ordering::Relaxed);
            if !matches!(reply, DeviceReply::Failed(_)) {
                queues
                    .into_iter()
                    .for_each(|(queue, runs)| running[queue].store(runs, Ordering::Relaxed));
            }
        });
        let now = self.worker.clock().now();
        let (device, mut cx) = self.worker.lend(guest as u32, now);
        let device = device.unwrap();
        device.begin_call(cx.shared);
        device.command(command, reply, &mut cx);
        device.end_call(cx.shared);
        self.worker.activate(guest as u32);
    }

    /// A command of the front-end, as a control thread would give it.
    fn any_command(&mut self, guest: usize, u: &mut Unstructured<'_>) -> Result<()> {
        let queue = u.int_in_range(0..=QUEUES - 1)?;
        let index = queue as u16;
        match u.int_in_range(0..=7u8)? {
            0 | 1 | 6 | 7 if !self.is_running(guest, queue) => {}
            0 | 1 => self.command(guest, DeviceCommand::StopQueue { index }),
            2 | 3 => {
                let base = self.avail[guest][queue];
                self.start(guest, queue, base);
            }
            4 => self.command(guest, DeviceCommand::ResetDevice),
            5 => self.command(guest, DeviceCommand::SetMemory(GUESTS[guest].1.clone())),
            _ => {
                let enabled = u.arbitrary()?;
                self.command(guest, DeviceCommand::EnableQueue { index, enabled });
            }
        }
        Ok(())
    }

    fn poke(&self, guest: usize, at: u64, bytes: &[u8]) {
        GUESTS[guest].0.write_all_at(bytes, at).unwrap();
    }

    /// Makes the chain with this head available.
    fn post(&mut self, guest: usize, queue: usize, head: u16) {
        let avail = &mut self.avail[guest][queue];
        let at = layout(queue).avail;
        let slot = u64::from(*avail % SIZE);
        *avail = avail.wrapping_add(1);
        let index = *avail;
        self.poke(guest, at + 4 + 2 * slot, &head.to_le_bytes());
        self.poke(guest, at + 2, &index.to_le_bytes());
    }

    fn descriptor(&self, guest: usize, queue: usize, slot: u16, it: (u64, u32, u16, u16)) {
        let (addr, len, flags, next) = it;
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.poke(
            guest,
            layout(queue).desc + 16 * u64::from(slot % SIZE),
            &bytes,
        );
    }

    /// Posts bytes in a chain of two descriptors, or in one.
    pub fn send(&mut self, guest: usize, queue: usize, bytes: &[u8], more: u32, split: usize) {
        let place = self.next[guest];
        let len = bytes.len() as u64;
        self.next[guest] = BUFFERS + (place + len - BUFFERS + 64) % 0x8000;
        self.poke(guest, place, bytes);
        let slot = self.avail[guest][queue].wrapping_mul(2) % SIZE;
        let split = split.min(bytes.len()) as u64;
        if split == 0 {
            self.descriptor(guest, queue, slot, (place, len as u32 + more, 0, 0));
        } else {
            let rest = (len - split) as u32 + more;
            self.descriptor(guest, queue, slot, (place, split as u32, 1, slot + 1));
            self.descriptor(guest, queue, slot + 1, (place + split, rest, 0, 0));
        }
        self.post(guest, queue, slot);
    }

    /// One step that any driver can make.
    pub fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let guest = usize::from(u.ratio(1, 4)?);
        match u.int_in_range(0..=11u8)? {
            0..=4 => self.turn(),
            5 | 6 => {
                for _ in 0..=u.int_in_range(0..=7u8)? {
                    let slot = self.avail[guest][0] % SIZE;
                    let at = BUFFERS + 0x8000 + 0x400 * u64::from(slot);
                    let len = [0x400, 0x400, 64, 20][u.choose_index(4)?];
                    self.descriptor(guest, 0, slot, (at, len, 2, 0));
                    self.post(guest, 0, slot);
                }
            }
            7 => {
                let (queue, slot) = (u.int_in_range(0..=2usize)?, u.arbitrary()?);
                let addr = match u.arbitrary()? {
                    true => u.arbitrary()?,
                    false => u64::from(u.arbitrary::<u16>()?),
                };
                let chain = (
                    addr,
                    number(u)?,
                    u.arbitrary::<u16>()? & 7,
                    u.arbitrary::<u16>()? % 20,
                );
                self.descriptor(guest, queue, slot, chain);
                if u.arbitrary()? {
                    self.post(guest, queue, slot % SIZE);
                }
            }
            8 | 9 => {
                let at = match u.ratio(1, 4)? {
                    true => u.int_in_range(0..=LEN - 8)?,
                    false => RING * u.int_in_range(0..=2u64)? + u.int_in_range(0..=0x1ff)?,
                };
                let bytes: [u8; 2] = u.arbitrary()?;
                self.poke(guest, at, &bytes);
            }
            10 => self.post(
                guest,
                u.int_in_range(0..=2)?,
                u.arbitrary::<u16>()? % (SIZE + 1),
            ),
            _ => self.any_command(guest, u)?,
        }
        Ok(())
    }

    /// Both devices have a turn.
    pub fn turn(&mut self) {
        for device in 0..DEVICES {
            self.worker.activate(device as u32);
        }
        assert!(self.worker.step(Some(Duration::ZERO)).unwrap());
    }

    /// Both front-ends disconnect. Each command is answered after a bounded number of turns.
    pub fn end(&mut self) {
        for guest in 0..DEVICES {
            self.command(guest, DeviceCommand::Disconnected);
        }
        let is_pending = |lab: &Lab<D>| lab.pending.iter().any(|it| it.load(Ordering::Relaxed));
        for turn in 0.. {
            assert!(turn < TURNS, "a command is never answered");
            self.turn();
            if !is_pending(self) && self.worker.is_idle() {
                break;
            }
        }
    }
}
