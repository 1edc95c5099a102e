//! AF_XDP on veth interfaces, in network namespaces of their own: frames in guest memory and around it,
//! memory that is refused, and sockets and interfaces that come and go. Needs CAP_SYS_ADMIN, CAP_BPF,
//! CAP_NET_ADMIN, CAP_NET_RAW and `ip`: without, the tests say SKIPPED.

mod life;
mod memory;
mod receive;
mod support;
mod transmit;
