//! The tests of this crate's public API: one program, which is linked and run once.
//!
//! A test that counts or changes something of its process (its allocator, its open descriptors, the
//! processor time of its threads) is a program of its own; the manifest lists them.

mod async_endpoint;
mod attach;
mod attached;
mod bounds;
mod common;
mod completions;
mod copies;
mod datagrams;
mod endpoint;
mod errors;
mod forward;
mod host;
mod host_bounds;
mod host_loans;
mod hostile;
mod hosting;
mod inline;
mod leases_sent;
mod lifecycle;
mod limits;
mod migration_log;
mod options;
mod pairs;
mod pressure;
mod readme;
mod rxmap;
mod scale;
mod sealed_memory;
mod seqpacket;
mod shutting;
mod siblings;
mod small_writes;
mod streams;
mod time_limits;
mod turns;
mod waiting;
