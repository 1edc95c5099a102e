//! The control control_plane behind real sockets: a front-end, sometimes that of the vhost crate, and a
//! worker that only answers.

mod fake;
mod faults;
mod lifecycle;
mod sequence;
