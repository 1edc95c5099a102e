//! The tests of the command: one program, which is linked and run once.
//!
//! Programs of their own: `isolation`, whose peers block threads on purpose, `net`, which is in network
//! namespaces, and `relay`, which raises the limit of descriptors of its process.

mod connection_log;
#[path = "../../zerosock/tests/common/driver.rs"]
mod driver;
mod forward;
mod greedy;
mod limits;
mod nc;
mod nc_seqpacket;
mod parent_watchdog;
mod perf;
mod process;
mod reload;
mod sandbox;
mod scale;
mod serve;
mod services;
mod supervised;
mod system_calls;
mod troubleshooting;
mod upgrades;
mod watchdog;
