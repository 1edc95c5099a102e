//! The thin conversion from validated settings to the library's daemon.

use super::Listeners;
use super::settings::Settings;

/// Why the devices could not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {}

/// The running devices.
pub(crate) struct Running {
    listeners: Vec<Listeners>,
}

/// Starts one device per VM.
pub(crate) fn start(settings: &Settings, listeners: Vec<Listeners>) -> Result<Running, StartError> {
    let _ = settings;
    Ok(Running { listeners })
}

impl Running {
    /// Stops the devices and closes their sockets.
    pub(crate) fn shutdown(self) {
        drop(self.listeners);
    }
}
