//! Device half and driver half together, checked step by step against plain containers.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::split::{AddError, Buffer, Chain, FixedChain};

/// Limits within which no address is used twice, so that a message in the wrong buffer is detected.
const MAX_STEPS: usize = 200;
const MAX_BUFFERS: usize = 12;
const MAX_LEN: u16 = 150;
const TABLE_LEN: u64 = 16 * MAX_BUFFERS as u64;
const _: () = assert!(MAX_STEPS as u64 * TABLE_LEN < DATA_LEN - 1000);
const _: () = assert!(MAX_STEPS * MAX_BUFFERS * (MAX_LEN as usize) < DATA_LEN as usize);

/// How the driver lays out a message; all are legal (virtio 1.2, 2.7.4.3: framing is free).
#[derive(Copy, Clone, Debug)]
enum Shape {
    /// Every buffer a descriptor.
    Direct,
    /// Every buffer in an indirect table.
    Indirect,
    /// The first buffer a descriptor, the others in a table behind it.
    Mixed,
}

#[derive(Clone, Debug)]
enum Step {
    /// Lengths of readable and of writable buffers.
    Add {
        shape: Shape,
        readable: Vec<u16>,
        writable: Vec<u16>,
    },
    /// One of the chains laid out at the start.
    AddFixed(prop::sample::Index),
    Post,
    Pop(u8),
    GiveBack(u8),
    /// Index of an outstanding chain, and how much of it is written.
    Complete(prop::sample::Index, prop::sample::Index),
    Return,
    Poll(u8),
    Remap,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let shape = prop_oneof![
        Just(Shape::Direct),
        Just(Shape::Indirect),
        Just(Shape::Mixed)
    ];
    // A header with its data in one, a header and many, only writable ones, both kinds.
    let lens = |most| prop::collection::vec(1..MAX_LEN, 0..=most);
    let add = (shape, lens(MAX_BUFFERS / 2), lens(MAX_BUFFERS / 2)).prop_map(
        |(shape, readable, writable)| Step::Add {
            shape,
            readable,
            writable,
        },
    );
    let step = prop_oneof![
        6 => add,
        4 => any::<prop::sample::Index>().prop_map(Step::AddFixed),
        3 => Just(Step::Post),
        5 => (1u8..20).prop_map(Step::Pop),
        1 => (1u8..4).prop_map(Step::GiveBack),
        5 => any::<(prop::sample::Index, prop::sample::Index)>().prop_map(|(a, b)| Step::Complete(a, b)),
        3 => Just(Step::Return),
        3 => (1u8..20).prop_map(Step::Poll),
        1 => Just(Step::Remap),
    ];
    prop::collection::vec(step, 1..if cfg!(miri) { 20 } else { MAX_STEPS })
}

/// A message in flight.
#[derive(Clone, Debug)]
struct Message {
    token: u64,
    head: u16,
    readable: Vec<u8>,
    writable: Vec<Buffer>,
    written: Vec<u8>,
}

/// Readable and writable bytes of a fixed chain.
const FIXED: [u32; 2] = [44, 100];

/// Both halves, and the position of every message according to plain containers.
struct Scene {
    driver: DriverQueue,
    device: DeviceQueue,
    size: u16,
    next_token: u64,
    /// The address of the next buffer, which soon crosses the border of the regions.
    arena: u64,
    /// Fixed chains: each with its token, its address, and whether it is idle.
    fixed: Vec<(FixedChain, u64, u64, bool)>,
    added: VecDeque<Message>,
    posted: VecDeque<Message>,
    out: Vec<(Message, Chain)>,
    completed: VecDeque<Message>,
    returned: VecDeque<Message>,
}

impl Scene {
    fn place(&mut self, len: u32) -> u64 {
        let addr = self.arena;
        self.arena += u64::from(len);
        addr
    }

    fn add(&mut self, shape: Shape, readable: &[u16], writable: &[u16]) {
        let token = self.next_token;
        self.next_token += 1;
        let mut buffers = Vec::new();
        let mut bytes = Vec::new();
        for (lens, writable) in [(readable, false), (writable, true)] {
            for &len in lens {
                let addr = self.place(len.into());
                buffers.push(Buffer {
                    addr,
                    len: len.into(),
                    writable,
                });
                if !writable {
                    let data: Vec<u8> = (0..len).map(|i| (token as u8) ^ (i as u8)).collect();
                    poke(self.driver.memory(), addr, &data);
                    bytes.extend(data);
                }
            }
        }
        let split = match shape {
            Shape::Direct => buffers.len(),
            Shape::Indirect => 0,
            Shape::Mixed => buffers.len().min(1),
        };
        let (direct, rest) = buffers.split_at(split);
        // Each message has its own table.
        let table = (!rest.is_empty()).then_some((DATA + token * TABLE_LEN, rest));
        let needed = direct.len() + usize::from(table.is_some());
        let free = usize::from(self.driver.free());
        let result = self.driver.add_mixed(direct, table, token);
        if buffers.is_empty() {
            assert_eq!(result, Err(AddError::Empty));
        } else if buffers.len() > usize::from(self.size) {
            assert_eq!(result, Err(AddError::TooLong));
        } else if needed > free {
            assert_eq!(result, Err(AddError::Full));
        } else {
            let head = result.expect("free descriptors");
            assert_eq!(usize::from(self.driver.free()), free - needed);
            let writable = buffers
                .iter()
                .copied()
                .filter(|buffer| buffer.writable)
                .collect();
            self.added.push_back(Message {
                token,
                head,
                readable: bytes,
                writable,
                written: vec![],
            });
        }
    }

    /// Sets as many fixed chains as the queue allows, up to `count`.
    fn set_chains(&mut self, count: usize) {
        for token in 0..count as u64 {
            let addr = self.place(FIXED[0] + FIXED[1]);
            let token = (1 << 32) + token;
            match self.driver.set_chain(&fixed_buffers(addr), token) {
                Ok(chain) => self.fixed.push((chain, token, addr, true)),
                Err(AddError::TooLong) => assert!(self.size < 2),
                Err(error) => assert_eq!((error, self.driver.free() < 2), (AddError::Full, true)),
            }
        }
    }

    fn add_fixed(&mut self, which: prop::sample::Index) {
        if self.fixed.is_empty() {
            return;
        }
        let index = which.index(self.fixed.len());
        let (chain, token, addr, here) = &mut self.fixed[index];
        if !std::mem::take(here) {
            assert_eq!(self.driver.add_fixed(*chain), Err(AddError::NotFixed));
            return;
        }
        self.next_token += 1;
        let readable = vec![self.next_token as u8; FIXED[0] as usize];
        poke(self.driver.memory(), *addr, &readable);
        self.driver.add_fixed(*chain).expect("a chain that is here");
        self.added.push_back(Message {
            token: *token,
            head: chain.head,
            readable,
            writable: fixed_buffers(*addr)[1..].to_vec(),
            written: vec![],
        });
    }

    fn pop(&mut self) {
        let chain = self.device.pop().expect("an honest driver");
        let (chain, message) = match (chain, self.posted.pop_front()) {
            (None, None) => return,
            (Some(chain), Some(message)) => (chain, message),
            (chain, message) => panic!("popped {chain:?}, expected {message:?}"),
        };
        assert_eq!(chain.head(), message.head);
        assert_eq!(chain.readable_len() as usize, message.readable.len());
        let writable_len: u32 = message.writable.iter().map(|buffer| buffer.len).sum();
        assert_eq!(chain.writable_len(), writable_len);
        assert_eq!(
            contents(self.device.memory(), chain.readable()),
            message.readable
        );
        self.out.push((message, chain));
    }

    fn complete(&mut self, which: prop::sample::Index, how_much: prop::sample::Index) {
        if self.out.is_empty() {
            return;
        }
        let (mut message, chain) = self.out.remove(which.index(self.out.len()));
        let written = how_much.index(chain.writable_len() as usize + 1);
        message.written = (0..written)
            .map(|i| (i as u8) ^ !(message.token as u8))
            .collect();
        let done = self
            .device
            .memory()
            .write(chain.writable(), 0, &message.written);
        assert_eq!(done, written);
        self.device.complete(chain, written as u32);
        self.completed.push_back(message);
    }

    fn poll(&mut self) {
        let used = self.driver.poll().expect("an honest device");
        let (used, message) = match (used, self.returned.pop_front()) {
            (None, None) => return,
            (Some(used), Some(message)) => (used, message),
            (used, message) => panic!("polled {used:?}, expected {message:?}"),
        };
        assert_eq!(
            (used.token, used.len as usize),
            (message.token, message.written.len())
        );
        let token = message.token;
        if let Some(fixed) = self.fixed.iter_mut().find(|fixed| fixed.1 == token) {
            fixed.3 = true;
        }
        let mut bytes = Vec::new();
        for buffer in &message.writable {
            bytes.extend(peek(self.driver.memory(), buffer.addr, buffer.len as usize));
        }
        assert_eq!(&bytes[..message.written.len()], &message.written[..]);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Add {
                shape,
                readable,
                writable,
            } => self.add(shape, &readable, &writable),
            Step::AddFixed(which) => self.add_fixed(which),
            Step::Post => {
                let _ = self.driver.publish();
                self.posted.append(&mut self.added);
            }
            Step::Pop(count) => (0..count).for_each(|_| self.pop()),
            Step::GiveBack(count) => {
                for _ in 0..count {
                    // Only the chain popped last can be unpopped; it may have been completed.
                    let last = self.device.base().wrapping_sub(1);
                    match self
                        .out
                        .iter()
                        .position(|(_, chain)| chain.position == last)
                    {
                        Some(index) => {
                            let (message, chain) = self.out.remove(index);
                            self.device.unpop(chain);
                            self.posted.push_front(message);
                        }
                        None => break,
                    }
                }
            }
            Step::Complete(which, how_much) => self.complete(which, how_much),
            Step::Return => {
                let _ = self.device.publish();
                self.returned.append(&mut self.completed);
            }
            Step::Poll(count) => (0..count).for_each(|_| self.poll()),
            Step::Remap => {
                let mem = std::sync::Arc::clone(self.device.memory());
                self.device.remap(mem).expect("the same memory");
            }
        }
        assert_eq!(usize::from(self.device.outstanding()), self.out.len());
    }
}

fn fixed_buffers(addr: u64) -> [Buffer; 2] {
    let [readable, writable] = FIXED;
    [
        Buffer {
            addr,
            len: readable,
            writable: false,
        },
        Buffer {
            addr: addr + u64::from(readable),
            len: writable,
            writable: true,
        },
    ]
}

fn case_count() -> u32 {
    if cfg!(miri) { 4 } else { 400 }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(case_count()) })]

    #[test]
    fn queues_agree_with_plain_containers(
        bits in 0u32..=10,
        base in prop_oneof![Just(0u16), 65500u16..=65535, any::<u16>()],
        event_idx: bool,
        fixed in 0usize..5,
        steps in steps(),
    ) {
        let size = 1 << bits;
        let (driver, device) = queues(size, base, event_idx);
        let mut scene = Scene {
            driver,
            device,
            size,
            next_token: 0,
            arena: BORDER - 1000,
            fixed: Vec::new(),
            added: VecDeque::new(),
            posted: VecDeque::new(),
            out: Vec::new(),
            completed: VecDeque::new(),
            returned: VecDeque::new(),
        };
        scene.set_chains(fixed);
        for step in steps {
            scene.step(step);
        }
        scene.drain();
        prop_assert_eq!(scene.driver.free(), size - 2 * scene.fixed.len() as u16);
        prop_assert!(scene.fixed.iter().all(|fixed| fixed.3));
        prop_assert_eq!(scene.device.malformed(), 0);
    }
}

impl Scene {
    fn under_way(&self) -> usize {
        self.added.len()
            + self.posted.len()
            + self.out.len()
            + self.completed.len()
            + self.returned.len()
    }

    /// Completes and polls every message.
    fn drain(&mut self) {
        self.step(Step::Post);
        while !self.posted.is_empty() {
            self.pop();
        }
        while let Some((message, chain)) = self.out.pop() {
            self.device.complete(chain, 0);
            self.completed.push_back(message);
        }
        self.step(Step::Return);
        while !self.returned.is_empty() {
            self.poll();
        }
        assert_eq!(self.under_way(), 0);
        assert_eq!(self.driver.poll(), Ok(None));
        assert!(self.device.pop().expect("an honest driver").is_none());
    }
}

#[test]
fn indices_wrap_many_times() {
    // 2.5 rounds of 65536 in batches of 7 on 8 descriptors; completed in reverse.
    let (mut driver, mut device) = queues(8, 65533, true);
    let mut expected = 0;
    let mut token = 0;
    let (batches, mut chains) = (if cfg!(miri) { 10 } else { 24_000 }, Vec::new());
    for _ in 0..batches {
        for _ in 0..7 {
            let buffer = Buffer {
                addr: DATA,
                len: 1,
                writable: true,
            };
            driver.add(&[buffer], token).unwrap();
            token += 1;
        }
        assert!(
            driver.publish(),
            "the device requested the first of the batch"
        );
        while let Some(chain) = device.pop().unwrap() {
            chains.push(chain);
        }
        assert_eq!(chains.len(), 7);
        for chain in chains.drain(..).rev() {
            device.complete(chain, 1);
        }
        assert!(device.publish());
        assert!(!device.enable_notifications());
        let tokens: Vec<_> = std::iter::from_fn(|| driver.poll().unwrap())
            .map(|u| u.token)
            .collect();
        assert_eq!(tokens, (expected..expected + 7).rev().collect::<Vec<_>>());
        expected += 7;
        assert!(!driver.enable_notifications());
    }
}
