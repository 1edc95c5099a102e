//! The device on AF_XDP sockets of one end of a veth pair. A packet socket is at the other end.

mod life;
mod limits;
mod link;
mod migration;
mod traffic;
mod uplink;
