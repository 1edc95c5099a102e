//! What an event loop is made of: a [`poller`] of descriptors, a [`mailbox`] for messages of other
//! threads, a [`clock`], and [`spin`]ning before it sleeps.
//!
//! # Invariants
//! Nothing in here knows devices or connections, and nothing blocks except [`poller::Poller::wait`].

pub(crate) mod clock;
pub(crate) mod deadline;
pub(crate) mod mailbox;
pub(crate) mod numbers;
pub(crate) mod poller;
pub(crate) mod spin;
