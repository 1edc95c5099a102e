//! The XDP program, assembled by hand.
//!
//! ```text
//! if the frame has more than MAX_FRAME bytes:
//!     if no socket is bound to the queue:    PASS   (to the stack of the kernel)
//!     count it; PASS or DROP, by choice
//! redirect(sockets[queue]), or PASS if there is none
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::MAX_FRAME;
use crate::bpf::BpfError;
use crate::bpf::assembler::{Assembler, MAP_LOOKUP_ELEM, R0, R1, R2, R3, R4, STACK};
use crate::bpf::calls::{self, Instruction, MapKind, ProgramKind};
use crate::bpf::maps::SharedArray;

/// The register of the frame, which a call keeps.
const FRAME: u8 = 6;
/// Where the number of the queue is on the stack.
const QUEUE_AT: i16 = -8;
/// Offsets in `struct xdp_md`.
const DATA: i16 = 0;
const DATA_END: i16 = 4;
const RX_QUEUE_INDEX: i16 = 16;
/// The function of the kernel.
const REDIRECT_MAP: i32 = 51;
/// Verdicts.
const DROP: i32 = 1;
const PASS: i32 = 2;

/// What becomes of frames of more than [`MAX_FRAME`](super::MAX_FRAME) bytes that arrive at a queue with a
/// socket. They are counted in any case.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum LongFrames {
    /// The stack of the kernel gets them.
    #[default]
    Pass,
    /// They are dropped.
    Drop,
}

#[derive(PartialEq)]
enum Label {
    Redirect,
    Pass,
}

/// Sockets by the number of their queue (BPF_MAP_TYPE_XSKMAP). A socket that is closed leaves it.
#[derive(Clone, Debug)]
pub(super) struct Sockets(Arc<OwnedFd>);

impl Sockets {
    pub(super) fn create(queues: u32) -> Result<Sockets, BpfError> {
        calls::create_map(MapKind::XskMap, 4, 4, queues, 0)
            .map(|map| Sockets(Arc::new(map)))
            .map_err(|error| BpfError::new("the map of AF_XDP sockets", error))
    }

    /// Has the program redirect frames of this queue to a socket.
    pub(super) fn insert(&self, queue: u32, socket: BorrowedFd<'_>) -> std::io::Result<()> {
        // SAFETY: keys and values of this map have four bytes, as `create` says.
        unsafe { calls::set(&self.0, queue, calls::number(socket)) }
    }

    /// Has the program redirect no frames of this queue any more.
    pub(super) fn remove(&self, queue: u32) {
        // SAFETY: as in `insert`.
        let removed = unsafe { calls::remove(&self.0, queue) };
        // It fails if there is none.
        let _ = removed;
    }
}

impl AsFd for Sockets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Loads the program. `counts` are the numbers of long frames by queue.
pub(super) fn load(
    sockets: &Sockets,
    counts: &SharedArray<AtomicU64>,
    long: LongFrames,
) -> Result<OwnedFd, BpfError> {
    let code = instructions(sockets.as_fd(), counts.as_fd(), long);
    let loaded = calls::load(ProgramKind::Xdp, &code, c"Dual MIT/GPL");
    loaded.map_err(|rejected| BpfError::of_program("the XDP program", rejected))
}

fn instructions(
    sockets: BorrowedFd<'_>,
    counts: BorrowedFd<'_>,
    long: LongFrames,
) -> Vec<Instruction> {
    let mut code = Assembler::new();
    code.copy(FRAME, R1);
    code.load_u32(R2, FRAME, RX_QUEUE_INDEX);
    code.store_u32(STACK, QUEUE_AT, R2);
    // In this form the verifier needs no CAP_PERFMON: subtracting addresses would.
    code.load_u32(R3, FRAME, DATA);
    code.load_u32(R4, FRAME, DATA_END);
    code.add_constant(R3, MAX_FRAME as i32 + 1);
    code.jump_if_greater(R3, R4, Label::Redirect);

    code.map(R1, sockets);
    code.address(R2, STACK, QUEUE_AT);
    code.call(MAP_LOOKUP_ELEM);
    code.jump_if_zero(R0, Label::Pass);
    code.map(R1, counts);
    code.address(R2, STACK, QUEUE_AT);
    code.call(MAP_LOOKUP_ELEM);
    code.jump_if_zero(R0, Label::Pass);
    code.count(R0, 0);
    code.finish(match long {
        LongFrames::Pass => PASS,
        LongFrames::Drop => DROP,
    });
    code.label(Label::Pass);
    code.finish(PASS);

    code.label(Label::Redirect);
    code.map(R1, sockets);
    code.load_u32(R2, STACK, QUEUE_AT);
    // The verdict if the queue has no socket.
    code.set(R3, PASS);
    code.call(REDIRECT_MAP);
    code.exit();
    code.assembled()
}
