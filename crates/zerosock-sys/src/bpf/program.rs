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
//! A redirected packet without bytes would be an error of the target (EPIPE), after which the kernel drops
//! all later ones. A redirected packet of several pieces, as network
//! devices deliver them, would become one datagram for each piece. Datagrams that stay at their socket would
//! be read as one: the kernel (seen on 6.18) keeps no bounds of what a program passes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::assembler::{Assembler, MAP_LOOKUP_ELEM, R0, R1, R2, R3, R4, STACK};
use super::calls::{self, Instruction, ProgramKind};
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
pub enum ArrivalSocket {
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
    pub fn load(maps: VerdictMaps<'_>, source: ArrivalSocket) -> Result<Program, BpfError> {
        const WHAT: &str = "the verdict program";
        let code = verdict(maps, source);
        let loaded = calls::load(ProgramKind::Verdict, &code, c"Dual MIT/GPL");
        loaded
            .map(Program)
            .map_err(|rejected| BpfError::of_program(WHAT, rejected))
    }
}

impl AsFd for Program {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Registers that a call keeps.
const PACKET: u8 = 6;
const LENGTH: u8 = 7;
const SLOT: u8 = 8;
const COOKIE: u8 = 9;

/// Places on the stack.
const COOKIE_AT: i16 = -8;
const NUMBER_AT: i16 = -16;

/// Functions of the kernel.
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
fn verdict(maps: VerdictMaps<'_>, source: ArrivalSocket) -> Vec<Instruction> {
    let mut code = Assembler::new();
    code.copy(PACKET, R1);
    match source {
        ArrivalSocket::Any => code.call(GET_SOCKET_COOKIE),
        ArrivalSocket::Only(cookie) => code.constant(R0, cookie),
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
