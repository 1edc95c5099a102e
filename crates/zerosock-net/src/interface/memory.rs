//! The memory that an interface shares with its device: two rings, and buffers of three kinds.
//!
//! # Invariants
//! - Nothing overlaps.
//! - A buffer is one piece: the header of its frame, and directly behind it the frame.

use zerosock_proto::wire::net::HEADER_LEN;
use zerosock_ring::{
    AddError, Buffer, DriverLayout, DriverQueue, FixedChain, Memory, Piece, TranslateError,
};
use zerosock_vhost_user::frontend::Plan;

use super::config::{InterfaceConfig, MAX_BUFFER};

/// Bytes of a header.
pub(super) const HEADER: u32 = HEADER_LEN as u32;

/// Buffers of equal length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffers {
    base: u64,
    stride: u64,
    /// Bytes of each, with a header.
    pub(super) len: u32,
    pub(super) count: u16,
}

impl Buffers {
    fn plan(plan: &mut Plan, len: u32, count: u16) -> Buffers {
        let stride = Plan::stride(len);
        Buffers {
            base: plan.take(stride * u64::from(count)),
            stride,
            len,
            count,
        }
    }

    fn addrs(self) -> impl Iterator<Item = u64> {
        (0..u64::from(self.count)).map(move |index| self.base + index * self.stride)
    }

    /// Appends the place of each in the mapping.
    pub(super) fn translate(
        self,
        memory: &Memory,
        out: &mut Vec<Piece>,
    ) -> Result<(), TranslateError> {
        // The memory is one region, so each buffer is one piece.
        self.addrs()
            .try_for_each(|addr| memory.translate(addr, self.len, out))
    }

    /// Writes the descriptor of each. The token of a chain is its place in `out`.
    pub(super) fn set_chains(
        self,
        queue: &mut DriverQueue,
        writable: bool,
        out: &mut Vec<FixedChain>,
    ) -> Result<(), AddError> {
        for addr in self.addrs() {
            let buffer = Buffer {
                addr,
                len: self.len,
                writable,
            };
            out.push(queue.set_chain(&[buffer], out.len() as u64)?);
        }
        Ok(())
    }
}

/// Where everything lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// The receive and the transmit ring.
    pub(super) rings: [DriverLayout; 2],
    /// Receive buffers.
    pub(super) receive: Buffers,
    /// Buffers of loans.
    pub(super) small: Buffers,
    /// Buffers of loans for the longest frames.
    pub(super) large: Buffers,
}

impl Layout {
    pub(super) fn new(config: &InterfaceConfig, plan: &mut Plan) -> Layout {
        let ring = |plan: &mut Plan, size| {
            DriverLayout::at(plan.take(DriverLayout::bytes_needed(size)), size)
        };
        let rings = [config.rx_queue_size, config.tx_queue_size].map(|size| ring(plan, size));
        let small = config.tx_queue_size - config.large_loans;
        Layout {
            rings,
            receive: Buffers::plan(plan, config.rx_buffer_size, config.rx_queue_size),
            small: Buffers::plan(plan, config.tx_buffer_size, small),
            large: Buffers::plan(plan, MAX_BUFFER, config.large_loans),
        }
    }
}
