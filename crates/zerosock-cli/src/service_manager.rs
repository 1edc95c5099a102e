//! Messages to the service manager, sd_notify(3).

use sd_notify::NotifyState;
use tracing::warn;

/// Notifies the service manager. Does nothing without one; a failure is logged and does not stop
/// serving.
pub(crate) fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn!("cannot notify the service manager: {error}");
    }
}
