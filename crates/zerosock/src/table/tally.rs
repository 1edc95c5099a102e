//! What an endpoint has sent and received.

/// Counters; no atomics, because only the thread that holds the endpoint's lock counts.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) packets_received: u64,
    pub(crate) packets_sent: u64,
    pub(crate) sent: u64,
    pub(crate) sent_in_place: u64,
    pub(crate) copied_in: u64,
    pub(crate) notifications: u64,
}

impl Tally {
    /// Counts a packet with so many bytes of payload.
    #[inline]
    pub(crate) fn count_sent(&mut self, bytes: u32) {
        self.packets_sent += 1;
        self.sent += u64::from(bytes);
    }
}
