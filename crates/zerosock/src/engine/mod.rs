//! The event loop: kicks, readable sockets and messages in; work out.
//!
//! A [`worker`] owns devices and shares nothing with other workers: no lock and no hop between
//! cores lies on the way of a packet. It sleeps in one `epoll_wait` and is woken by a guest's
//! kick, a socket's edge, a timer or its [`mailbox`]; [`pulse`] tells whether it makes progress. Devices come and go by message; [`numbers`]
//! tells them apart. What must hold: nothing in here blocks,
//! and every device gets its turn ([`crate::device::Device::turn`] works to a budget).

pub(crate) mod host;
mod intake;
#[cfg(test)]
mod intake_tests;
pub(crate) mod messages;
#[cfg(test)]
mod turn_tests;
pub(crate) mod worker;
