//! Sockets.
pub(crate) mod engine;
pub(crate) mod leases;
pub(crate) mod sockets;
