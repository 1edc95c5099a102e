//! The parts of an event loop: a [`poller`] of descriptors, a [`mailbox`] for messages of other
//! threads, a [`clock`], and [`spin`], which decides whether to poll before sleeping.
//!
//! # Invariants
//!
//! - No code here knows devices or connections.
//! - Nothing blocks except [`poller::Poller::wait`].

pub(crate) mod clock;
pub(crate) mod deadline;
pub(crate) mod mailbox;
pub(crate) mod numbers;
pub(crate) mod poller;
pub(crate) mod spin;
