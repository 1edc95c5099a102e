//! The state that all sockets of an endpoint share: the backend behind a lock, and the waiters.
//!
//! # Invariants
//! - No lost wake-up: a waiter registers, then arms the rings, then sleeps. A thread that releases
//!   the lock wakes the waiters of every socket that has an event and arms the rings again for the
//!   waiters that sleep on them.
//! - No missed timer: each waiter on the rings has a recorded wake-up time. A thread that sets an
//!   earlier timer wakes one such waiter.
//! - A thread that holds the lock never blocks on it: such a call panics, and a socket that the
//!   thread drops meanwhile is closed when the thread releases the lock.
//!
//! # Driving
//! An endpoint has no thread of its own unless one is asked for. The calling thread drives the queues for all sockets:
//!
//! - Each call takes the lock once, for any number of packets.
//! - A call that must wait spins first, if its [`Wait`](super::waiting::Wait) says so. It holds the
//!   lock while it spins and yields it to threads that want it. Then it sleeps: the first sleeper
//!   waits on the backend's descriptor, with one system call, which also clears what has woken it;
//!   later ones park until another thread unparks them.
//! - Dropping a lease never waits for the lock. If no thread holds it, the drop takes it and returns
//!   the buffer. Otherwise the lease is pushed onto a lock-free stack ([`Leases`]). The lock holder
//!   empties the stack, and checks it again after it has released the lock.
//!
//! # Files
//! `background` is the handle of the thread that drives an endpoint on request. `lock` has the lock, `wait` blocks a call, `waiters` registers and wakes waiters. Below them are
//! `waiter`, `tasks`, `wait_budget` and `descriptors`; `reactor` is the handle of the task that
//! drives an endpoint in a tokio runtime.

mod background;
mod descriptors;
#[cfg(test)]
mod hook;
mod lock;
#[cfg(test)]
mod lost_wakeup_tests;
#[cfg(feature = "tokio")]
mod reactor;
#[cfg(feature = "tokio")]
mod tasks;
#[cfg(test)]
mod tests;
mod wait;
mod wait_budget;
mod waiter;
mod waiters;

pub(crate) use background::Background;
#[cfg(feature = "tokio")]
pub(crate) use descriptors::TimerFd;
pub(crate) use descriptors::{EventFd, epoll_of};
pub(crate) use lock::{Core, DeferredClose, Locked};
#[cfg(feature = "tokio")]
pub(crate) use reactor::Reactor;
pub(crate) use wait_budget::{WaitBudget, WaitFault, WaitMode};
pub(crate) use waiter::Interest;
pub(crate) use waiters::AlreadyReady;
