//! The tables: their cases, peers and units.

pub(crate) mod device;
pub(crate) mod dgram;
pub(crate) mod hold;
pub(crate) mod local;
pub(crate) mod net;
pub(crate) mod relay;
pub(crate) mod rx;
pub(crate) mod scale;
pub(crate) mod zc;
