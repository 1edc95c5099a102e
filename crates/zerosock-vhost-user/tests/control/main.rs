//! The control thread behind real sockets: a front-end, in some tests that of the vhost crate, and
//! a worker that only answers.

mod fake;
mod faults;
mod lifecycle;
mod log;
mod network;
mod sequence;
