//! Devices with several queue pairs (docs/queue-pairs.md): connections begin at the pair of their
//! hash, and move between pairs while bytes pass in both directions.

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
