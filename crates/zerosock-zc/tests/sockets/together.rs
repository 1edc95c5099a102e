//! Several threads over one sender, each with a random mix of all calls: together they get every
//! report, each once.

use std::collections::BTreeMap;
use std::io::Read;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use zerosock_zc::{Completion, Copying, Notification, Outgoing, SendBackend, Sender, SharedSender};

use crate::network::{BACKENDS, CABLE, SINK, accept, byte, slow_down, with_cable, with_sink};

const PATIENCE: Duration = Duration::from_secs(300);
const THREADS: u64 = 6;
const EACH: u64 = 300;
const SLOTS: [u64; 3] = [100, 200, 300];
/// The header of a message: its name and its length.
const HEADER: usize = 16;

/// The reports that one thread has got.
#[derive(Default)]
struct Heard {
    /// The names of the buffers, and their numbers.
    back: Vec<(u64, Option<u32>)>,
    told: Vec<Completion>,
    posted: Vec<Notification>,
}

impl Heard {
    fn take_back(&mut self, sender: &SharedSender<Vec<u8>>) {
        for mut returned in std::iter::from_fn(|| sender.returned()) {
            returned.outcome.expect("it was sent");
            self.back
                .push((name_of(&returned.buffer).0, returned.number));
            // The kernel must no longer read it.
            returned.buffer.fill(0xee);
        }
    }

    fn take_posted(&mut self, sender: &SharedSender<Vec<u8>>) {
        self.posted
            .extend(std::iter::from_fn(|| sender.notification()));
    }

    fn take_told(&mut self, sender: &SharedSender<Vec<u8>>, room: &mut [Completion]) -> usize {
        let count = sender.completions(room).expect("the kernel answers");
        self.told.extend_from_slice(&room[..count]);
        count
    }

    fn add(&mut self, other: Heard) {
        self.back.extend(other.back);
        self.told.extend(other.told);
        self.posted.extend(other.posted);
    }
}

/// A message of its own: its name and length, and bytes that follow from its name.
fn message(name: u64, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (name << 20..).map(byte).take(len).collect();
    bytes[..8].copy_from_slice(&name.to_ne_bytes());
    bytes[8..HEADER].copy_from_slice(&(len as u64).to_ne_bytes());
    bytes
}

fn name_of(message: &[u8]) -> (u64, usize) {
    let number = |at: usize| u64::from_ne_bytes(message[at..at + 8].try_into().expect("eight"));
    (number(0), number(8) as usize)
}

/// Length of a message in bytes; on a stream some are above the limit of a gathered request.
fn len_of(name: u64, longest: usize) -> usize {
    HEADER + (name.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % (longest - HEADER)
}

/// Sends, and asks, each time in another way.
fn mix(sender: &SharedSender<Vec<u8>>, thread: u64, longest: usize) -> Heard {
    let mut heard = Heard::default();
    let mut room = [Completion::default(); 16];
    for turn in 0..EACH {
        let name = thread * EACH + turn;
        let mut outgoing = Outgoing::new(message(name, len_of(name, longest)));
        outgoing.copying = match turn % 4 {
            0 => Copying::Always,
            _ => Copying::Never,
        };
        if !name.is_multiple_of(5) {
            outgoing.slot = Some((name % 3) as u32);
            outgoing.flush = name.is_multiple_of(7);
        }
        let mode = (turn + thread) % 6;
        let room = match mode {
            // Any room, also none.
            2 => &mut room[..turn as usize % 17],
            _ => &mut room[..],
        };
        let sent = match mode {
            2 => {
                let sent = sender.send_with(outgoing, room);
                sent.map(|count| heard.told.extend_from_slice(&room[..count]))
            }
            _ => sender.send(outgoing).map(drop),
        };
        sent.map_err(|refused| refused.why).expect("it is accepted");
        match mode {
            0 => heard.take_back(sender),
            1 => heard.take_posted(sender),
            3 => drop(heard.take_told(sender, room)),
            4 => {
                let began = Instant::now();
                sender.wait(Some(PATIENCE)).expect("the kernel answers");
                assert!(began.elapsed() < PATIENCE, "nothing was news");
                heard.take_back(sender);
                heard.take_posted(sender);
            }
            5 => sender.flush(turn as u32 % 3..3).expect("slots"),
            _ => {}
        }
    }
    heard
}

fn open(backend: SendBackend, socket: impl Into<std::os::fd::OwnedFd>) -> SharedSender<Vec<u8>> {
    let builder = Sender::builder().backend(backend).capacity(24);
    let builder = builder.inline_completions().slots(SLOTS);
    let sender = builder.open(socket).expect("a sender");
    sender.into_shared().expect("descriptors")
}

/// All threads together get every report once.
fn all_together(sender: &SharedSender<Vec<u8>>, longest: usize, what: &str) {
    let mut heard = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let sender = sender.clone();
                scope.spawn(move || mix(&sender, thread, longest))
            })
            .collect();
        let mut heard = Heard::default();
        for thread in threads {
            heard.add(thread.join().expect("a thread"));
        }
        heard
    });
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    // The sequence number of one more notifier per slot is the number of earlier ones.
    let most = THREADS * EACH;
    for slot in 0..SLOTS.len() as u64 {
        let name = most + slot;
        let outgoing = Outgoing::new(message(name, len_of(name, longest)));
        let outgoing = outgoing.slot(slot as u32).copying(Copying::Never);
        let sent = sender.send(outgoing);
        sent.map_err(|refused| refused.why).expect("it is accepted");
    }
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    heard.take_back(sender);
    heard.take_posted(sender);
    while heard.take_told(sender, &mut [Completion::default(); 5]) > 0 {}

    let mut names: Vec<u64> = heard.back.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    assert!(names.iter().copied().eq(0..most + 3), "{what}: buffers");
    let numbered = (most * 3 / 4 + 3) as u32;
    let mut numbers: Vec<u32> = heard
        .back
        .iter()
        .filter_map(|(_, number)| *number)
        .collect();
    numbers.sort_unstable();
    assert!(numbers.iter().copied().eq(0..numbered), "{what}: numbers");
    let mut told: Vec<u32> = heard
        .told
        .iter()
        .flat_map(|range| (0..range.count()).map(|step| range.lo.wrapping_add(step)))
        .collect();
    told.sort_unstable();
    assert!(told.iter().copied().eq(0..numbered), "{what}: ranges");
    let mut posted: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for Notification { tag, sequence } in heard.posted {
        posted.entry(tag).or_default().push(sequence);
    }
    assert!(posted.keys().copied().eq(SLOTS), "{what}: slots");
    for (tag, sequences) in &mut posted {
        sequences.sort_unstable();
        let all = 0..sequences.len() as u32;
        assert!(sequences.iter().copied().eq(all), "{what}: {tag}");
        // Notifications of flushes, not only of the final one.
        assert!(sequences.len() > 10, "{what}: {tag}: {}", sequences.len());
    }
    assert_eq!(sender.stats().failed, 0, "{what}");
}

#[test]
fn threads_get_every_datagram_report_once_by_mixed_calls() {
    with_sink("threads_that_ask_of_datagrams", || {
        for backend in BACKENDS {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
            socket.connect(SINK[0]).expect("a route");
            all_together(&open(backend, socket), 9000, &format!("{backend:?}"));
        }
    });
}

/// Reads messages to the end of the stream. Each is intact, and arrives once.
fn read_messages(mut stream: TcpStream, longest: usize) {
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("the stream goes on");
    let (mut rest, mut names) = (&bytes[..], Vec::new());
    while rest.len() >= HEADER {
        let (name, len) = name_of(rest);
        assert_eq!(len, len_of(name, longest), "a message of {name}");
        let expected = message(name, len);
        assert!(rest[..len] == expected, "the contents of {name}");
        names.push(name);
        rest = &rest[len..];
    }
    names.sort_unstable();
    assert!(names.into_iter().eq(0..THREADS * EACH + 3));
}

#[test]
fn threads_get_every_stream_report_once_by_mixed_calls() {
    const LONGEST: usize = 30_000;
    for backend in BACKENDS {
        let (told, address) = mpsc::channel();
        with_cable(
            "threads_that_ask_of_a_stream",
            move || {
                slow_down();
                let address: std::net::SocketAddr = address.recv().expect("the far end");
                let socket = TcpStream::connect(address).expect("a route");
                let sender = open(backend, socket);
                all_together(&sender, LONGEST, &format!("{backend:?}"));
            },
            move || {
                let listener = TcpListener::bind(CABLE[0][1]).expect("an address");
                let address = listener.local_addr().expect("an address");
                told.send(address).expect("the near end");
                read_messages(accept(&listener), LONGEST);
            },
        );
    }
}
