//! Senders on real sockets: in network namespaces that the tests create, and on loopback where
//! nothing depends on the device.

mod alone;
mod asleep;
mod bad_input;
mod calls;
mod corks;
mod cut_short;
#[cfg(feature = "tokio")]
mod delayed;
mod denied;
mod ends;
#[cfg(feature = "tokio")]
mod ends_shared;
mod faults;
mod files;
mod forked;
mod gathered;
mod kept;
mod kinds;
mod knowing;
mod late_errors;
mod limits;
#[cfg(feature = "tokio")]
mod loops;
mod model;
mod network;
mod orphans;
mod pieces;
mod pools;
#[cfg(feature = "tokio")]
mod shared;
mod sink;
mod slots;
mod sockmap;
mod streams;
mod threshold;
mod together;
mod upper_layer;
mod used;
