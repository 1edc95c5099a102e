//! Devices with several queue pairs (docs/queue-pairs.md): connections begin at the pair of their
//! hash, and stay there whatever an older driver asks for.

#[path = "../common/mod.rs"]
mod common;
mod counting;
mod endpoints;
mod guest;
mod hosted;
mod hostile;
#[path = "../hosting/mod.rs"]
mod hosting;
mod placing;
mod streams;
