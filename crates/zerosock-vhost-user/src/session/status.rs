//! The device status (virtio 1.3, 2.1), which the front-end sets as the driver does.
//!
//! No request depends on it. FEATURES_OK is kept back if the last features were refused, so that a
//! front-end that reads the status learns of that.
//!
//! 0 does not reset the device: QEMU 7.2 sends it when it stops the device, before it asks for the
//! indices of the queues (GET_VRING_BASE), which a migration needs.

use super::super::stats::FrontendFault;
use super::arguments::Arguments;
use super::state::{Accepted, Denied, Session};

const FEATURES_OK: u8 = 8;
/// The bits that a driver sets: ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK and FAILED.
const OF_DRIVER: u8 = 1 | 2 | 4 | FEATURES_OK | 128;

pub(super) fn set_status(
    session: &mut Session,
    arguments: Arguments<'_>,
) -> Result<Accepted, Denied> {
    let wide = arguments.u64()?;
    let status = u8::try_from(wide).ok();
    let Some(mut status) = status.filter(|status| status & !OF_DRIVER == 0) else {
        return Err((
            FrontendFault::Payload,
            format!("status {wide:#x} has unknown bits"),
        ));
    };
    if session.features_refused {
        status &= !FEATURES_OK;
    }
    session.status = status;
    Ok(Accepted::Ack)
}

pub(super) fn get_status(session: &mut Session, _: Arguments<'_>) -> Result<Accepted, Denied> {
    let status = u64::from(session.status).to_ne_bytes();
    Ok(Accepted::Answer(status.to_vec()))
}
