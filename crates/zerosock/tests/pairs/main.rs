//! Devices with several queue pairs (docs/queue-pairs.md): connections that begin at the pair of
//! their hash, and that are moved between pairs while bytes go both ways.

#[path = "../common/mod.rs"]
mod common;
mod counting;
mod endpoints;
mod guest;
mod hosted;
mod hostile;
#[path = "../hosting/mod.rs"]
mod hosting;
mod movers;
mod moves;
mod placing;
