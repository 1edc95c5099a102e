//! The tests of this crate's public API: one program, which is linked and run once. Those with an
//! allocator of their own are programs of their own.

mod behaviour;
mod datagrams;
mod hostile;
mod messages;
mod net_header;
mod packets;
mod two_shards;
