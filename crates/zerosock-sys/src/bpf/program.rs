//! The verdict program, assembled by hand.
//!
//! It runs for each packet that arrives at a socket of [`Sources`](super::Sources), one at a time for
//! each socket of a stream. `slot` stands for the [`Slot`](super::Slot) of the socket:
//!
//! ```text
//! number = numbers[cookie of the socket]       no entry: PASS
//! slot = slots[number]
//! if slot.cookie != cookie of the socket:      PASS
//! if the packet has no bytes:                  count it as dropped, DROP
//! if slot.passed != slot.handled:              refuse
//! if slot.bytes + length > slot.allowance:     refuse
//! if slot.whole and the packet cannot be made
//!    one piece of memory:                      refuse
//! if !redirect(packet, targets[number]):       refuse
//! count packet and length; PASS                (which a redirect has turned into the target's)
//! refuse:  if slot.whole:                      count it as dropped, DROP
//!          count length as passed; PASS        (the packet stays at its socket, for recv(2))
//! ```
//!
//! A redirected packet without bytes, such as the end of a TCP stream, would be an error of the target
//! (EPIPE), after which the kernel drops all later ones. A redirected packet of several pieces, as network
//! devices deliver them, would become one datagram for each piece. Datagrams that stay at their socket would
//! be read as one: the kernel (seen on 6.18) keeps no bounds of what a program passes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::calls::{self, Instruction};
use super::error::BpfError;
use super::maps::{NumberByCookie, Slot, Slots, SockMap};

/// A loaded verdict program.
#[derive(Debug)]
pub struct Program(OwnedFd);

/// The maps that a verdict program uses.
#[derive(Copy, Clone, Debug)]
pub struct VerdictMaps<'a> {
    /// Numbers of sockets.
    pub numbers: &'a NumberByCookie,
    /// State of the direction that begins at each numbered socket.
    pub slots: &'a Slots,
    /// Where packets of each numbered socket go.
    pub targets: &'a SockMap,
}

/// How a program finds out at which socket a packet has arrived.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Source {
    /// By asking the kernel: for sockets of all families but Unix. A packet of a Unix socket belongs
    /// to its sender, so that the kernel gives the wrong cookie.
    Any,
    /// The program is attached to a map with one socket, of this cookie.
    Only(u64),
}

impl Program {
    /// Loads the program.
    ///
    /// # Errors
    /// See [`BpfError`].
    pub fn load(maps: VerdictMaps<'_>, source: Source) -> Result<Program, BpfError> {
        const WHAT: &str = "the verdict program";
        let code = verdict(maps, source);
        match calls::load_verdict(&code, c"Dual MIT/GPL") {
            Ok(program) => Ok(Program(program)),
            Err(rejected) if rejected.log.is_empty() => Err(BpfError::new(WHAT, rejected.error)),
            Err(rejected) => Err(BpfError::Rejected {
                what: WHAT,
                error: rejected.error,
                log: rejected.log,
            }),
        }
    }
}

impl AsFd for Program {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Registers: the result, and the arguments of a call.
const R0: u8 = 0;
const R1: u8 = 1;
const R2: u8 = 2;
const R3: u8 = 3;
const R4: u8 = 4;
/// Registers that a call keeps.
const PACKET: u8 = 6;
const LENGTH: u8 = 7;
const SLOT: u8 = 8;
const COOKIE: u8 = 9;
/// End of the stack.
const STACK: u8 = 10;

/// Places on the stack.
const COOKIE_AT: i16 = -8;
const NUMBER_AT: i16 = -16;

/// Functions of the kernel.
const MAP_LOOKUP_ELEM: i32 = 1;
const SKB_PULL_DATA: i32 = 39;
const GET_SOCKET_COOKIE: i32 = 46;
const SK_REDIRECT_MAP: i32 = 52;

/// Verdicts.
const DROP: i32 = 0;
const PASS: i32 = 1;

/// Places that jumps go to.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Label {
    Redirect,
    Pass,
    Refuse,
    Drop,
}

/// The instructions of the program.
fn verdict(maps: VerdictMaps<'_>, source: Source) -> Vec<Instruction> {
    let mut code = Assembler::default();
    code.copy(PACKET, R1);
    match source {
        Source::Any => code.call(GET_SOCKET_COOKIE),
        Source::Only(cookie) => code.constant(R0, cookie),
    }
    code.copy(COOKIE, R0);
    code.store(STACK, COOKIE_AT, COOKIE);
    code.load_u32(LENGTH, PACKET, 0);

    code.map(R1, maps.numbers.as_fd());
    code.address(R2, STACK, COOKIE_AT);
    code.call(MAP_LOOKUP_ELEM);
    code.jump_if_zero(R0, Label::Pass);
    code.load_u32(R1, R0, 0);
    code.store_u32(STACK, NUMBER_AT, R1);

    code.map(R1, maps.slots.as_fd());
    code.address(R2, STACK, NUMBER_AT);
    code.call(MAP_LOOKUP_ELEM);
    code.jump_if_zero(R0, Label::Pass);
    code.copy(SLOT, R0);
    code.load_u64(R1, SLOT, Slot::COOKIE);
    code.jump_if_different(R1, COOKIE, Label::Pass);
    code.jump_if_zero(LENGTH, Label::Drop);

    code.load_u64(R1, SLOT, Slot::HANDLED);
    code.load_u64(R2, SLOT, Slot::PASSED);
    code.jump_if_different(R1, R2, Label::Refuse);
    code.load_u64(R1, SLOT, Slot::BYTES);
    code.add(R1, LENGTH);
    code.load_u64(R2, SLOT, Slot::ALLOWANCE);
    code.jump_if_greater(R1, R2, Label::Refuse);

    code.load_u64(R1, SLOT, Slot::WHOLE);
    code.jump_if_zero(R1, Label::Redirect);
    code.copy(R1, PACKET);
    code.copy(R2, LENGTH);
    code.call(SKB_PULL_DATA);
    code.set(R1, 0);
    code.jump_if_different(R0, R1, Label::Refuse);

    code.label(Label::Redirect);
    code.copy(R1, PACKET);
    code.map(R2, maps.targets.as_fd());
    code.load_u32(R3, STACK, NUMBER_AT);
    code.set(R4, 0);
    code.call(SK_REDIRECT_MAP);
    code.jump_if_zero(R0, Label::Refuse);
    code.add_atomically(SLOT, Slot::BYTES, LENGTH);
    code.count(SLOT, Slot::PACKETS);
    code.finish(PASS);

    code.label(Label::Refuse);
    code.load_u64(R1, SLOT, Slot::WHOLE);
    code.set(R2, 0);
    code.jump_if_different(R1, R2, Label::Drop);
    code.add_atomically(SLOT, Slot::PASSED, LENGTH);
    code.label(Label::Pass);
    code.finish(PASS);

    code.label(Label::Drop);
    code.count(SLOT, Slot::DROPPED);
    code.finish(DROP);
    code.assembled()
}

/// Collects instructions, and resolves jumps forward.
#[derive(Default)]
struct Assembler {
    code: Vec<Instruction>,
    /// Jumps, by index, and where they go.
    jumps: Vec<(usize, Label)>,
    labels: Vec<(Label, usize)>,
}

impl Assembler {
    fn push(&mut self, code: u8, destination: u8, source: u8, offset: i16, immediate: i32) {
        self.code.push(Instruction {
            code,
            registers: source << 4 | destination,
            offset,
            immediate,
        });
    }

    /// `destination = source`, 64 bits.
    fn copy(&mut self, destination: u8, source: u8) {
        self.push(0xbf, destination, source, 0, 0);
    }

    /// `destination = value`, a small number.
    fn set(&mut self, destination: u8, value: i32) {
        self.push(0xb7, destination, 0, 0, value);
    }

    /// `destination = value`, in two instructions.
    fn constant(&mut self, destination: u8, value: u64) {
        self.push(0x18, destination, 0, 0, value as u32 as i32);
        self.push(0, 0, 0, 0, (value >> 32) as u32 as i32);
    }

    /// `destination = map` (BPF_PSEUDO_MAP_FD), in two instructions.
    fn map(&mut self, destination: u8, map: BorrowedFd<'_>) {
        const PSEUDO_MAP_FD: u8 = 1;
        let number = calls::number(map) as i32;
        self.push(0x18, destination, PSEUDO_MAP_FD, 0, number);
        self.push(0, 0, 0, 0, 0);
    }

    /// `destination = base + offset`.
    fn address(&mut self, destination: u8, base: u8, offset: i16) {
        self.copy(destination, base);
        self.push(0x07, destination, 0, 0, offset.into());
    }

    /// `destination += source`.
    fn add(&mut self, destination: u8, source: u8) {
        self.push(0x0f, destination, source, 0, 0);
    }

    /// `destination = *(u32 *)(base + offset)`.
    fn load_u32(&mut self, destination: u8, base: u8, offset: i16) {
        self.push(0x61, destination, base, offset, 0);
    }

    /// `destination = *(u64 *)(base + offset)`.
    fn load_u64(&mut self, destination: u8, base: u8, offset: i16) {
        self.push(0x79, destination, base, offset, 0);
    }

    /// `*(u64 *)(base + offset) = source`.
    fn store(&mut self, base: u8, offset: i16, source: u8) {
        self.push(0x7b, base, source, offset, 0);
    }

    /// `*(u32 *)(base + offset) = source`.
    fn store_u32(&mut self, base: u8, offset: i16, source: u8) {
        self.push(0x63, base, source, offset, 0);
    }

    /// `*(u64 *)(base + offset) += source`, atomically.
    fn add_atomically(&mut self, base: u8, offset: i16, source: u8) {
        self.push(0xdb, base, source, offset, 0);
    }

    /// `*(u64 *)(base + offset) += 1`, atomically.
    fn count(&mut self, base: u8, offset: i16) {
        self.set(R1, 1);
        self.add_atomically(base, offset, R1);
    }

    fn call(&mut self, function: i32) {
        self.push(0x85, 0, 0, 0, function);
    }

    /// `return verdict`.
    fn finish(&mut self, verdict: i32) {
        self.set(R0, verdict);
        self.push(0x95, 0, 0, 0, 0);
    }

    fn jump_if_zero(&mut self, register: u8, label: Label) {
        self.jump(0x15, register, 0, label);
    }

    fn jump_if_different(&mut self, one: u8, other: u8, label: Label) {
        self.jump(0x5d, one, other, label);
    }

    /// Compares numbers without sign.
    fn jump_if_greater(&mut self, one: u8, other: u8, label: Label) {
        self.jump(0x2d, one, other, label);
    }

    fn jump(&mut self, code: u8, destination: u8, source: u8, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.push(code, destination, source, 0, 0);
    }

    /// The next instruction is where jumps to `label` go.
    fn label(&mut self, label: Label) {
        self.labels.push((label, self.code.len()));
    }

    fn assembled(mut self) -> Vec<Instruction> {
        for (from, label) in self.jumps {
            let place = self.labels.iter().find(|(known, _)| *known == label);
            // A missing label leaves a jump to the next instruction; the tests load all programs.
            let to = place.map_or(from + 1, |(_, place)| *place);
            self.code[from].offset = (to - from - 1) as i16;
        }
        self.code
    }
}
