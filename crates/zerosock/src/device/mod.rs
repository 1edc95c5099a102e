//! The device half: a vhost-user back-end that gives a guest a vsock device.

pub mod control;
