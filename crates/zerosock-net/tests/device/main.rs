//! The device with a driver that writes its rings by hand, on a TAP in a network namespace of the
//! test's own. The host's side is a packet socket.

mod announcements;
mod backpressure;
mod control;
mod driver;
mod errors;
mod frames;
mod hostile;
mod life;
mod migration;
mod network;
mod random;
mod room;
mod switch;
mod traffic;
mod xdp;
