//! Messages to the service manager, sd_notify(3), by way of the supervisor if there is one.

use sd_notify::NotifyState;
use tracing::warn;

use crate::supervised::supervisor;

/// Notifies the service manager. Does nothing without one; a failure is logged and does not stop
/// serving.
pub(crate) fn notify(state: &[NotifyState<'_>]) {
    let sent = match supervisor() {
        Some(client) => {
            let text: String = state.iter().map(|state| format!("{state}\n")).collect();
            client
                .notify(text.trim_end())
                .map_err(|error| error.to_string())
        }
        None => sd_notify::notify(state).map_err(|error| error.to_string()),
    };
    if let Err(error) = sent {
        warn!("cannot notify the service manager: {error}");
    }
}
