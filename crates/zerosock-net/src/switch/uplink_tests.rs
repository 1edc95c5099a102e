//! The uplink on a back-end that does what a test says.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use zerosock_proto::wire::net::{GSO_TCPV4, NEEDS_CSUM};
use zerosock_ring::GuestSlice;
use zerosock_sys::notify::Notifier;
use zerosock_virtio::poller::Poller;

use super::super::device::SwitchDevice;
use super::super::frames::Batch;
use super::*;

/// What a back-end does, and has done.
#[derive(Default)]
struct Script {
    /// Frames that it takes.
    room: usize,
    /// Lengths of the frames that it was given.
    sent: Vec<usize>,
    /// What its next calls of `receive` do: a frame of this length, or an error.
    received: VecDeque<Result<usize, FrameError>>,
    is_retired: bool,
}

struct Scripted(Arc<Mutex<Script>>);

impl Backend for Scripted {
    type Message = Never;

    fn receive(
        &mut self,
        _: usize,
        _: &mut Header,
        _: &[GuestSlice<'_>],
        _: &mut [u8],
    ) -> Result<usize, FrameError> {
        let next = self.0.lock().unwrap().received.pop_front();
        next.unwrap_or(Err(FrameError::NotNow))
    }

    fn send(
        &mut self,
        _: usize,
        frame: &Frame<'_>,
        _: u64,
        _: Instant,
    ) -> Result<Sent, FrameError> {
        let mut script = self.0.lock().unwrap();
        if script.room == 0 {
            return Err(FrameError::NotNow);
        }
        script.room -= 1;
        script.sent.push(frame.len);
        Ok(Sent::Done)
    }

    fn has_room(&self, _: usize) -> bool {
        self.0.lock().unwrap().room > 0
    }

    fn on_message(&mut self, message: Never, _: Instant, _: &mut NetStats) -> bool {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }

    fn retire(&mut self, _: &mut Outbox<Never>) {
        self.0.lock().unwrap().is_retired = true;
    }
}

const GUEST: DeviceAddr = DeviceAddr {
    worker: 0,
    number: 1,
};

fn uplink() -> (Uplink<Scripted>, Arc<Mutex<Script>>) {
    let script = Arc::<Mutex<Script>>::default();
    let config = UplinkConfig {
        addr: DeviceAddr {
            worker: 0,
            number: 0,
        },
        name: "uplink".into(),
        counters: Arc::default(),
        gone: Arc::new(BackendGoneEvent::new().unwrap()),
    };
    let backend = Scripted(Arc::clone(&script));
    let uplink = Uplink::new(config, &Switch::new(), backend).unwrap();
    (uplink, script)
}

const HEADERS: usize = 54;
const SEGMENT: usize = 1000;
const SEGMENTS: usize = 60;

/// Adds a TSO frame of a guest, in its memory, to a batch.
fn add_tso(batch: &mut Batch, memory: &Arc<Memory>) {
    let mut header = Header::default();
    header.set_flags(NEEDS_CSUM);
    header.set_csum_start(34);
    header.set_csum_offset(16);
    header.set_gso_type(GSO_TCPV4);
    header.set_gso_size(SEGMENT as u16);
    header.set_hdr_len(HEADERS as u16);
    let len = HEADERS + SEGMENTS * SEGMENT;
    let mut pieces = Vec::new();
    memory.translate(0, len as u32, &mut pieces).unwrap();
    let addresses: Addresses = memory.read_array(&pieces, 0).unwrap();
    let frame = Frame {
        header,
        len,
        first: &addresses,
        memory: Some(memory),
        pieces: &pieces,
        skip: ADDRESSES_LEN,
        slices: &[],
    };
    batch.push(&frame, &addresses, (0, None));
}

/// Memory with the headers of TCP over IPv4 in front of zeroes.
fn memory() -> Arc<Memory> {
    let len = 64 << 10;
    let file: OwnedFd = memfd::create("guest", len, true).unwrap();
    let memory = Memory::of_file(file, len).unwrap();
    let mut headers = [0; HEADERS];
    headers[12..14].copy_from_slice(&[8, 0]);
    headers[14] = 0x45;
    headers[23] = 6;
    headers[46] = 0x50;
    let mut pieces = Vec::new();
    memory.translate(0, HEADERS as u32, &mut pieces).unwrap();
    memory.write(&pieces, 0, &headers);
    Arc::new(memory)
}

/// Uncut frames have 4 MiB of room.
#[test]
fn tso_frames_wait_uncut_and_their_sender_gets_its_buffers_back() {
    const FRAMES: usize = 90;
    const WAITING: usize = (4 << 20) / (HEADERS + SEGMENTS * SEGMENT);
    let (mut uplink, script) = uplink();
    let memory = memory();
    let now = Instant::ZERO;
    let mut batch = Batch::new(GUEST);
    (0..FRAMES).for_each(|_| add_tso(&mut batch, &memory));
    let mut outbox = Outbox::new(0);
    uplink.inbox.add_batch(batch);
    uplink.send(now);
    uplink.finish(&mut outbox);
    assert!(outbox.pop_local().is_some_and(|(to, _)| to == GUEST.number));
    for _ in 0..2 {
        script.lock().unwrap().room = 10;
        uplink.send(now);
    }
    assert_eq!(script.lock().unwrap().sent, [HEADERS + SEGMENT; 20]);
    script.lock().unwrap().room = usize::MAX;
    uplink.send(now);
    // The first one was cut before the others waited.
    assert_eq!(script.lock().unwrap().sent.len(), (1 + WAITING) * SEGMENTS);
    assert_eq!(uplink.tally.tx_refused, (FRAMES - 1 - WAITING) as u64);
    assert_eq!(uplink.tally.tx_frames, ((1 + WAITING) * SEGMENTS) as u64);
}

#[test]
fn reading_goes_on_after_an_error() {
    let (mut uplink, script) = uplink();
    let now = Instant::ZERO + Duration::from_secs(1);
    script.lock().unwrap().received = [
        Ok(60),
        Err(FrameError::Refused),
        Ok(60),
        Err(FrameError::LinkDown),
        Ok(60),
    ]
    .into();
    for (later, frames, dropped) in [(0, 1, 1), (5, 1, 1), (10, 2, 1), (20, 3, 1)] {
        let now = now + Duration::from_millis(later);
        assert!(!uplink.receive(now));
        let tally = &uplink.tally;
        assert_eq!((tally.rx_frames, tally.rx_dropped), (frames, dropped));
        let retry = uplink.readable.next_timeout();
        assert_eq!(retry.is_some(), frames < 3, "{retry:?}");
    }
}

#[test]
fn uplink_that_is_removed_retires_its_back_end() {
    let (mut uplink, script) = uplink();
    let mut cx: Context<'_, SwitchDevice<Scripted>> = Context {
        now: Instant::ZERO,
        clock: None,
        poller: &Poller::new().unwrap(),
        outbox: &mut Outbox::new(0),
        notifier: &Notifier::new(),
        spins: false,
        shared: &mut (),
    };
    uplink.retire(&mut cx.of());
    assert!(script.lock().unwrap().is_retired);
}
