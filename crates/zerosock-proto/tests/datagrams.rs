//! Two tables of datagram sockets, joined by a queue that loses flow control packets, compared with
//! a plain model: a list of lengths for each receiver.

use std::collections::VecDeque;

use proptest::prelude::*;
use zerosock_proto::time::Duration;
use zerosock_proto::vsock::datagram::{
    Assembler, DatagramId, DatagramLimits, DatagramRefusal, DatagramTable, DropCause, OVERHEAD,
    PayloadPart, STOP_DURATION, data,
};
use zerosock_proto::wire::vsock::Repr;
use zerosock_proto::{Address, Cid, Instant, Port};

const SENDER: Cid = Cid::new(3);
const RECEIVER: Cid = Cid::HOST;
const LIMITS: DatagramLimits = DatagramLimits {
    receive: 40_000,
    send: 8_000,
};

#[derive(Clone, Debug)]
enum Act {
    /// From one of the sender's sockets to one of the receiver's.
    Send { from: usize, to: usize, len: u32 },
    /// The receiver takes so many packets off the queue.
    Deliver(usize),
    /// A reader takes a datagram.
    Read(usize),
    /// The receiver's control packets arrive, or are lost.
    Words { lost: bool },
    /// Milliseconds.
    Time(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (0..2usize, 0..3usize, 0..12_000u32)
            .prop_map(|(from, to, len)| Act::Send { from, to, len }),
        4 => (1..8usize).prop_map(Act::Deliver),
        4 => (0..2usize).prop_map(Act::Read),
        2 => any::<bool>().prop_map(|lost| Act::Words { lost }),
        1 => (0..600u64).prop_map(Act::Time),
    ]
}

struct World {
    now: Instant,
    sender: DatagramTable,
    receiver: DatagramTable,
    sources: Vec<DatagramId>,
    sinks: Vec<DatagramId>,
    wire: VecDeque<(DatagramId, Repr)>,
    /// The datagrams that each reader is to get, and the bytes they count for.
    model: Vec<VecDeque<u32>>,
    lost: u64,
}

impl World {
    fn new() -> World {
        let mut sender = DatagramTable::new(SENDER);
        let mut receiver = DatagramTable::new(RECEIVER);
        World {
            now: Instant::ZERO,
            sources: (0..2)
                .map(|_| sender.bind(Port::ANY, LIMITS).unwrap())
                .collect(),
            sinks: (0..2)
                .map(|port| receiver.bind(Port::new(port), LIMITS).unwrap())
                .collect(),
            sender,
            receiver,
            wire: VecDeque::new(),
            model: vec![VecDeque::new(); 2],
            lost: 0,
        }
    }

    fn send(&mut self, from: usize, to: usize, len: u32) -> Result<(), DatagramRefusal> {
        let (id, now) = (self.sources[from], self.now);
        // The third port has no socket.
        let to = Address::new(RECEIVER, Port::new(to as u32));
        let local = self.sender.may_send(id, to, len as usize, || now)?;
        self.sender.sent(id, len, true);
        self.wire.push_back((id, data(local, to, len, true)));
        Ok(())
    }

    fn deliver(&mut self) -> Option<()> {
        let (id, header) = self.wire.pop_front()?;
        self.sender.handle_completed(id, header.len);
        let now = self.now;
        let got = self
            .receiver
            .receive(header.src, header.dst, header.len, true, || now);
        let port = header.dst.port.get() as usize;
        let want = match self.model.get_mut(port) {
            None => Err(DropCause::NoSocket),
            Some(list) => {
                let used: u32 = list.iter().map(|len| len + OVERHEAD).sum();
                if used > LIMITS.receive {
                    self.lost += 1;
                    Err(DropCause::Full)
                } else {
                    list.push_back(header.len);
                    Ok(self.sinks[port])
                }
            }
        };
        assert_eq!(got, want);
        Some(())
    }

    fn read(&mut self, sink: usize) -> Option<()> {
        let len = self.model[sink].pop_front()?;
        self.receiver.consume(self.sinks[sink], len);
        Some(())
    }

    fn words(&mut self, lost: bool) {
        let now = self.now;
        while let Some(word) = self.receiver.poll_control(now, |_| true) {
            if !lost {
                assert!(self.sender.handle_control(now, &word));
            }
        }
    }

    fn time(&mut self, by: Duration) {
        self.now += by;
        let now = self.now;
        self.sender.handle_timeout(now);
        self.receiver.handle_timeout(now);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn table_agrees_with_a_list(acts in prop::collection::vec(act(), 1..300)) {
        let mut world = World::new();
        for act in acts {
            match act {
                Act::Send { from, to, len } => {
                    let _ = world.send(from, to, len);
                }
                Act::Deliver(count) => {
                    (0..count).for_each(|_| { world.deliver(); });
                }
                Act::Read(sink) => { world.read(sink); }
                Act::Words { lost } => world.words(lost),
                Act::Time(ms) => world.time(Duration::from_millis(ms)),
            }
        }
        // Whatever was lost: when all is read, every sender may send after a while.
        while world.deliver().is_some() {}
        for sink in 0..2 {
            while world.read(sink).is_some() {}
        }
        world.time(STOP_DURATION);
        for from in 0..2 {
            for to in 0..3 {
                prop_assert_eq!(world.send(from, to, 1), Ok(()));
            }
        }
    }

    /// While control packets arrive before the sources fill their buffers, no datagram is lost,
    /// however slow a reader is.
    #[test]
    fn flow_control_prevents_loss(acts in prop::collection::vec(act(), 1..300)) {
        let mut world = World::new();
        for act in acts {
            match act {
                Act::Send { from, to, len } => {
                    let _ = world.send(from, to.min(1), len.min(4000));
                }
                Act::Deliver(count) => {
                    (0..count).for_each(|_| { world.deliver(); });
                    world.words(false);
                }
                Act::Read(sink) => { world.read(sink); world.words(false); }
                Act::Words { .. } => world.words(false),
                Act::Time(ms) => {
                    // In steps, so that full receivers repeat STOP in time.
                    for _ in 0..ms / 100 {
                        world.time(Duration::from_millis(100));
                        world.words(false);
                    }
                }
            }
        }
        prop_assert_eq!(world.lost, 0);
    }

    /// Compared with a model that keeps the fragments of the present datagram in a list.
    #[test]
    fn datagrams_are_complete_or_dropped(
        packets in prop::collection::vec((0..2u32, 0..40_000u32, any::<bool>()), 1..100)
    ) {
        let mut assembler = Assembler::new();
        let mut kept: Option<(u32, Vec<u32>)> = None;
        for (source, len, last) in packets {
            let src = Address::new(SENDER, Port::new(source));
            let dst = Address::new(RECEIVER, Port::new(9));
            let piece = assembler.handle(&data(src, dst, len, last), || Instant::ZERO);
            let mut set = match kept.take() {
                Some((of, set)) if of == source => set,
                _ => Vec::new(),
            };
            let first = set.is_empty();
            set.push(len);
            let sum: u32 = set.iter().sum();
            let want = match (first, last, sum) {
                (true, true, _) => PayloadPart::Whole,
                (true, false, _) => PayloadPart::First,
                (false, _, 65537..) => PayloadPart::Lost,
                (false, true, len) => PayloadPart::Last { len },
                (false, false, _) => PayloadPart::More,
            };
            prop_assert_eq!(piece, want);
            if !last {
                kept = Some((source, set));
            }
        }
    }
}
