//! Counters of what a driver received and did not use.

/// Counters since the driver was attached; [`EndpointStats`](crate::vsock::EndpointStats) has the others.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct DriverStats {
    /// Invalid packets: shorter than a header or than their length field, or with invalid fields.
    pub rx_malformed: u64,
    /// Well-formed packets that the protocol core dropped.
    pub rx_dropped: u64,
    /// TRANSPORT_RESET events received.
    pub transport_resets: u64,
    /// Events of an unknown kind or too short.
    pub unknown_events: u64,
}
