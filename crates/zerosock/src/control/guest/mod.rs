//! Guest endpoints: endpoints on pages of a guest, next to the vsock device of its kernel.
//!
//! A privileged process of the guest, the agent, connects to the control port of CID 2 and names the pages, as extents
//! of guest-physical memory, that are the memory of an endpoint. The daemon, which has all memory of the VM mapped,
//! checks them and runs a device on rings in these pages. This module has the protocol of the stream between the two.
//!
//! ```text
//!  agent                                      daemon
//!                                             Hello: a nonce
//!  writes a value into each page
//!  Register: name, extents                    checks tag, extents, and the value of each page
//!                                             Accepted: CID, token of the doorbell
//!  clears the pages, opens the doorbell
//!  Start: features, rings                     starts the device
//!                                             Started
//!  End                                        stops the device
//!                                             Ended: the daemon does not touch the pages any more
//! ```
//!
//! The last value of a huge page lies in its last cache line, which the driver leaves free. After the VM was stopped the
//! daemon reads it again, to find out whether it still has the same pages.
//!
//! A stream is for one endpoint, which ends with it. An agent that finds memory of an earlier one asks by `Query`, on a
//! stream of its own, whether the daemon still uses it.
//!
//! A later minor version of the protocol changes no request and sends no new answer. It may have more reasons, and more
//! fields behind those of an answer, which an older agent ignores.
//!
//! # Invariants
//! - Requests of an agent without the key of the VM are refused before anything behind the header is read.
//! - No page is written before all have shown the value that follows from the nonce and their place in the list. The
//!   last value of each huge page stays there: after a stop of the VM the daemon looks for it again.
//! - The agent gives pages back to its kernel only after `Ended` for their attachment, or `Known` that says that it is
//!   not in use.

// - `wire`: the messages, pure functions;
// - `client`: the agent's side of a stream;
// - `options`: what a VM may have;
// - `server`: the side of the daemon, on the control thread;
// - `agent`: the agent, which uses `client`.

pub mod agent;
pub mod client;
pub(crate) mod options;
pub(crate) mod server;
pub mod wire;

pub use crate::registration::{DOORBELL_PORT, REGISTRATION_PORT, key, page_value};
