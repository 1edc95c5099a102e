//! The atomics of the index protocol, in one place so that loom can stand in for them.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU16, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU16, Ordering, fence};
