//! Small packets when the peer has room for few: they wait for each other.
//!
//! Linux counts the packets that its receiver has not read, and resets a connection that has too
//! many, however small they are ([`PACKET_OVERHEAD`]). So packets are counted as well as bytes
//! ([`TxCredit`]), and a third of those that there is room for is kept for packets that are not small:
//! as many as it takes to fill the buffer. A reader that waits for a full one gets it, as long as its
//! sender can leave small pieces where they are until there are more. What must hold: who holds back
//! is told, by the peer's reading or by a timer, and may then send what it has.
//!
//! [`PACKET_OVERHEAD`]: crate::vsock::credit::PACKET_OVERHEAD
//! [`TxCredit`]: crate::vsock::credit::TxCredit

use core::hash::BuildHasher;

use super::Shard;
use crate::vsock::connection::FlowId;
use crate::vsock::credit::SMALL;

impl<S: BuildHasher> Shard<S> {
    /// Whether so many packets are under way to the peer that small ones should wait for each
    /// other; then [`Shard::holds_back`] decides.
    #[inline]
    pub fn is_short(&self, flow: FlowId) -> bool {
        let connection = self.table.get(flow);
        connection.is_some_and(|connection| connection.tx.is_short())
    }

    /// Whether `bytes` bytes that are ready to be sent should wait for more to go with them in one
    /// packet. If so, [`Event::Writable`](crate::vsock::Event::Writable) follows: when the peer has
    /// read, or after 2 ms, and after twice as long each time, when they may go as they are. To be
    /// asked again when there are more. For streams whose bytes can be left where they come from.
    pub fn holds_back(&mut self, flow: FlowId, bytes: u32) -> bool {
        let Some(connection) = self.table.get_mut(flow) else {
            return false;
        };
        if !connection.tx.is_short() {
            (connection.passed, connection.passes) = (0, false);
            return false;
        }
        // A window that opens by little makes small packets too.
        if bytes.min(connection.tx.available()) >= SMALL
            || !connection.may_send()
            || connection.messages.is_some()
        {
            connection.holds_back = false;
            return false;
        }
        if core::mem::take(&mut connection.passes) {
            connection.passed = connection.passed.saturating_add(1);
            return false;
        }
        connection.holds_back = true;
        connection.wants_credit = true;
        self.ask_for_credit(flow.index);
        true
    }

    /// Who holds back has waited for long enough, if it does.
    pub(super) fn let_pass(&mut self, index: u32) {
        let Some(connection) = self.table.at(index) else {
            return;
        };
        if connection.holds_back && connection.is_stalled() && connection.tx.available() > 0 {
            (connection.holds_back, connection.passes) = (false, true);
            self.credit_changed(index);
        }
    }
}
