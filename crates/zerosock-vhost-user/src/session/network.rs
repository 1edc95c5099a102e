//! The requests of network devices: their MTU, and the announcement of a guest that has moved.

use std::sync::Arc;

use super::super::DeviceCommand;
use super::super::stats::FrontendFault;
use super::arguments::Arguments;
use super::state::{Accepted, Denied, OnDone, Session};

/// Sets the MTU, in bytes. It stays in force when the driver changes its features: QEMU sends it before
/// them.
pub(super) fn set_mtu(session: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let wide = arguments.u64()?;
    let mtu = u16::try_from(wide).map_err(|_| {
        (
            FrontendFault::Payload,
            format!("an MTU of {wide} bytes: has 16 bits"),
        )
    })?;
    let mut config = session.config.to_vec();
    session.model.set_mtu(&mut config, mtu)?;
    let config: Arc<[u8]> = config.into();
    Ok(Accepted::Command(
        DeviceCommand::SetConfig(Arc::clone(&config)),
        OnDone::Mtu(mtu, config),
    ))
}

/// The MAC address is in the first six bytes of the payload.
pub(super) fn send_rarp(_: &mut Session, arguments: Arguments<'_>) -> Result<Accepted, Denied> {
    let [a, b, c, d, e, f, _, _] = arguments.u64()?.to_ne_bytes();
    Ok(Accepted::Command(
        DeviceCommand::SendRarp([a, b, c, d, e, f]),
        OnDone::Nothing,
    ))
}
