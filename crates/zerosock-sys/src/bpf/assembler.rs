//! An assembler for eBPF.

use std::os::fd::BorrowedFd;

use super::calls::{self, Instruction};

/// Registers: the result, and the arguments of a call.
pub(crate) const R0: u8 = 0;
pub(crate) const R1: u8 = 1;
pub(crate) const R2: u8 = 2;
pub(crate) const R3: u8 = 3;
pub(crate) const R4: u8 = 4;
/// End of the stack.
pub(crate) const STACK: u8 = 10;
/// The function of the kernel that finds the value of a key, or 0.
pub(crate) const MAP_LOOKUP_ELEM: i32 = 1;

/// Collects instructions, and resolves jumps forward.
///
/// `L` names the places that jumps go to.
pub(crate) struct Assembler<L> {
    code: Vec<Instruction>,
    /// Jumps, by index, and where they go.
    jumps: Vec<(usize, L)>,
    labels: Vec<(L, usize)>,
}

impl<L: PartialEq> Assembler<L> {
    pub(crate) fn new() -> Assembler<L> {
        Assembler {
            code: Vec::new(),
            jumps: Vec::new(),
            labels: Vec::new(),
        }
    }

    fn push(&mut self, code: u8, destination: u8, source: u8, offset: i16, immediate: i32) {
        self.code.push(Instruction {
            code,
            registers: source << 4 | destination,
            offset,
            immediate,
        });
    }

    /// `destination = source`, 64 bits.
    pub(crate) fn copy(&mut self, destination: u8, source: u8) {
        self.push(0xbf, destination, source, 0, 0);
    }

    /// `destination = value`, a small number.
    pub(crate) fn set(&mut self, destination: u8, value: i32) {
        self.push(0xb7, destination, 0, 0, value);
    }

    /// `destination = value`, in two instructions.
    pub(crate) fn constant(&mut self, destination: u8, value: u64) {
        self.push(0x18, destination, 0, 0, value as u32 as i32);
        self.push(0, 0, 0, 0, (value >> 32) as u32 as i32);
    }

    /// `destination = map` (BPF_PSEUDO_MAP_FD), in two instructions.
    pub(crate) fn map(&mut self, destination: u8, map: BorrowedFd<'_>) {
        const PSEUDO_MAP_FD: u8 = 1;
        let number = calls::number(map) as i32;
        self.push(0x18, destination, PSEUDO_MAP_FD, 0, number);
        self.push(0, 0, 0, 0, 0);
    }

    /// `destination = base + offset`.
    pub(crate) fn address(&mut self, destination: u8, base: u8, offset: i16) {
        self.copy(destination, base);
        self.add_constant(destination, offset.into());
    }

    /// `destination += value`.
    pub(crate) fn add_constant(&mut self, destination: u8, value: i32) {
        self.push(0x07, destination, 0, 0, value);
    }

    /// `destination += source`.
    pub(crate) fn add(&mut self, destination: u8, source: u8) {
        self.push(0x0f, destination, source, 0, 0);
    }

    /// `destination = *(u32 *)(base + offset)`.
    pub(crate) fn load_u32(&mut self, destination: u8, base: u8, offset: i16) {
        self.push(0x61, destination, base, offset, 0);
    }

    /// `destination = *(u64 *)(base + offset)`.
    pub(crate) fn load_u64(&mut self, destination: u8, base: u8, offset: i16) {
        self.push(0x79, destination, base, offset, 0);
    }

    /// `*(u64 *)(base + offset) = source`.
    pub(crate) fn store(&mut self, base: u8, offset: i16, source: u8) {
        self.push(0x7b, base, source, offset, 0);
    }

    /// `*(u32 *)(base + offset) = source`.
    pub(crate) fn store_u32(&mut self, base: u8, offset: i16, source: u8) {
        self.push(0x63, base, source, offset, 0);
    }

    /// `*(u64 *)(base + offset) += source`, atomically.
    pub(crate) fn add_atomically(&mut self, base: u8, offset: i16, source: u8) {
        self.push(0xdb, base, source, offset, 0);
    }

    /// `*(u64 *)(base + offset) += 1`, atomically.
    pub(crate) fn count(&mut self, base: u8, offset: i16) {
        self.set(R1, 1);
        self.add_atomically(base, offset, R1);
    }

    pub(crate) fn call(&mut self, function: i32) {
        self.push(0x85, 0, 0, 0, function);
    }

    /// `return verdict`.
    pub(crate) fn finish(&mut self, verdict: i32) {
        self.set(R0, verdict);
        self.exit();
    }

    /// `return R0`.
    pub(crate) fn exit(&mut self) {
        self.push(0x95, 0, 0, 0, 0);
    }

    pub(crate) fn jump_if_zero(&mut self, register: u8, label: L) {
        self.jump(0x15, register, 0, label);
    }

    pub(crate) fn jump_if_different(&mut self, one: u8, other: u8, label: L) {
        self.jump(0x5d, one, other, label);
    }

    /// Compares numbers without sign.
    pub(crate) fn jump_if_greater(&mut self, one: u8, other: u8, label: L) {
        self.jump(0x2d, one, other, label);
    }

    fn jump(&mut self, code: u8, destination: u8, source: u8, label: L) {
        self.jumps.push((self.code.len(), label));
        self.push(code, destination, source, 0, 0);
    }

    /// The next instruction is where jumps to `label` go.
    pub(crate) fn label(&mut self, label: L) {
        self.labels.push((label, self.code.len()));
    }

    pub(crate) fn assembled(mut self) -> Vec<Instruction> {
        for (from, label) in self.jumps {
            let place = self.labels.iter().find(|(known, _)| *known == label);
            // A missing label leaves a jump to the next instruction; the tests load all programs.
            let to = place.map_or(from + 1, |(_, place)| *place);
            self.code[from].offset = (to - from - 1) as i16;
        }
        self.code
    }
}
