//! Interfaces of this process on a switch: contents, offloads, waiting, and proof that leases and loans
//! lie in the memory that is shared.

mod addresses;
mod exchange;
mod lan;
