//! Peers that try to hold the threads of `zerosock serve` in system calls on objects of their own.
//!
//! Each test has one daemon with two VMs on one worker: the attacker and the neighbour. While a thread
//! of the daemon is seen asleep in the attacker's object, the neighbour's data goes round and its
//! vhost-user requests are answered. The thread has to be one of the expendable ones, and it still has
//! to be asleep in the same call afterwards.

mod attack;
mod daemon;
mod death;
mod exiting;
mod files;
mod fuse;
mod large_vm;
mod lingering;
mod looping;
mod many;
mod neighbour;
mod own_end;
mod pipe;
mod pipe_lock;
#[path = "../process/mod.rs"]
mod process;
mod programs;
mod raw;
mod sockets;
mod threads;
