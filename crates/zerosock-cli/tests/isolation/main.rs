//! Peers that try to block the threads of `zerosock serve` in system calls on their own objects.
//!
//! Each test has one daemon with two VMs on one worker: the attacker and the neighbour. While a
//! thread of the daemon sleeps in a call on the attacker's object, the neighbour's data is echoed
//! and its vhost-user requests are answered. The blocked thread must be one of the expendable ones,
//! and must still sleep in the same call afterwards.

mod attack;
mod daemon;
mod death;
#[path = "../../../zerosock/tests/common/driver.rs"]
mod driver;
mod exiting;
mod few_descriptors;
mod files;
mod fuse;
mod large_vm;
mod lingering;
mod looping;
mod many;
mod neighbour;
mod own_end;
mod paths;
mod pipe;
mod pipe_lock;
#[path = "../process/mod.rs"]
mod process;
mod program_own_end;
mod programs;
mod raw;
mod sockets;
mod threads;
