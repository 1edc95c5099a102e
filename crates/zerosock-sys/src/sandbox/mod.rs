//! Confines this process: what code of an attacker in it can still reach.
//!
//! # Invariants
//! - [`confine_files`] and [`become_user`] are called while this process has one thread: a namespace, a Landlock
//!   domain and a user belong to threads, and threads that exist would keep theirs.
//! - Capabilities belong to threads, too: a thread that starts before [`drop_capabilities`] calls it itself.
//!   [`threads_with_capabilities`] finds those that have not.
//! - [`filter_calls`] covers all threads. Threads share memory, so a thread without the filter would be no boundary.
//!
//! # Operation
//! [`confine_files`], then [`become_user`], then set-up, then [`drop_capabilities`], then the threads,
//! and [`filter_calls`] before the first byte of a peer is read. io_uring submits calls that a filter does not see,
//! so the filter refuses its calls: a ring that is needed would have to exist before, with restrictions.

mod calls;
mod files;
mod filter;
mod namespace;
mod place;
mod process;
mod refused;

pub use files::{Files, confine_files};
pub use filter::{CallPolicy, filter_calls, filter_supervisor_calls};
pub use process::{
    User, become_user, drop_capabilities, join_group, limit_capabilities, raise_locked_memory,
    refuse_dumps, threads_with_capabilities,
};
pub use refused::log_refused_calls;
pub use rustix::thread::CapabilitySet;
