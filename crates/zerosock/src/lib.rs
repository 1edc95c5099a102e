//! Zero-copy sockets between virtual machines, hosts and processes.

pub mod device;
