//! The networks of the file, `net`: virtio-net devices with threads of their own.

use tracing::error;

use super::error::ServeError;
use super::settings::Settings;
use crate::net::network::{Common, Opened, Serving};
use crate::net::xdp::Interfaces;
use crate::net::{ENDED, drop_capabilities};

/// Networks whose interfaces and sockets exist.
pub(super) struct Networks(Vec<Opened>);

/// Makes the interfaces and the sockets, and drops the capabilities for that if there are any: called
/// before the first thread starts.
pub(super) fn open(settings: &Settings) -> Result<Networks, ServeError> {
    let common = Common {
        access: settings.access,
        max_memory: settings.max_memory,
        sealed_memory: settings.sealed_memory,
        spin: settings.spin,
    };
    let networks = settings.net.iter();
    let mut interfaces = Interfaces::default();
    let opened = networks.map(|network| network.clone().open(&common, &mut interfaces));
    let opened = opened.collect::<Result<Vec<_>, _>>();
    let opened = opened.map_err(ServeError::Network)?;
    if !opened.is_empty() {
        let uses_xdp = settings.net.iter().any(|network| network.xdp.is_some());
        drop_capabilities(uses_xdp).map_err(ServeError::Network)?;
    }
    Ok(Networks(opened))
}

impl Networks {
    /// Starts the threads.
    pub(super) fn serve(self) -> Result<Running, ServeError> {
        let serving = self.0.into_iter().map(Opened::serve);
        let serving = serving.collect::<Result<Vec<_>, _>>();
        Ok(Running(serving.map_err(ServeError::Network)?))
    }
}

/// Networks that run.
pub(super) struct Running(Vec<Serving>);

impl Running {
    /// Ends the networks that have lost their interface. The others go on.
    pub(super) fn check(&mut self) {
        for network in self.0.extract_if(.., |network| network.has_ended()) {
            error!("net: {ENDED}");
            network.shutdown();
        }
    }

    pub(super) fn shutdown(self) {
        self.0.into_iter().for_each(Serving::shutdown);
    }
}
