//! The networks of the file, `net`: virtio-net devices with threads of their own.

use tracing::error;
use zerosock_sys::reaper;

use super::error::ServeError;
use super::settings::Settings;
use crate::failure::Failure;
use crate::net::ENDED;
use crate::net::network::{Common, Network, OpenedNetwork, Serving};
use crate::net::xdp::Interfaces;
use crate::sandbox::Sandbox;

/// Networks with interfaces and sockets, before their threads start.
pub(super) struct Networks {
    opened: Vec<(Network, OpenedNetwork)>,
    running: RunningNetworks,
}

/// Makes the interfaces and the sockets, and drops the capabilities for that, also if there are no networks:
/// called before the first thread starts.
pub(super) fn open(settings: &Settings, sandbox: &Sandbox) -> Result<Networks, ServeError> {
    let common = Common {
        access: settings.access,
        max_memory: settings.max_memory,
        sealed_memory: settings.sealed_memory,
        spin: settings.spin,
    };
    let mut running = RunningNetworks {
        common,
        interfaces: Interfaces::default(),
        serving: Vec::new(),
    };
    let opened = running
        .open_new(&settings.net)
        .map_err(ServeError::Network)?;
    sandbox.drop_capabilities().map_err(ServeError::Network)?;
    Ok(Networks { opened, running })
}

impl Networks {
    /// Starts the threads.
    pub(super) fn serve(mut self) -> Result<RunningNetworks, ServeError> {
        for (network, opened) in self.opened {
            let serving = opened.serve().map_err(ServeError::Network)?;
            self.running.serving.push((network, serving));
        }
        Ok(self.running)
    }
}

/// Networks that run.
pub(super) struct RunningNetworks {
    common: Common,
    interfaces: Interfaces,
    serving: Vec<(Network, Serving)>,
}

impl RunningNetworks {
    /// Whether there is one.
    pub(super) fn are_served(&self) -> bool {
        !self.serving.is_empty()
    }

    /// Makes the interfaces and the sockets of the networks that do not run.
    ///
    /// # Errors
    /// One of them cannot be made; none is then.
    pub(super) fn open_new(
        &mut self,
        wanted: &[Network],
    ) -> Result<Vec<(Network, OpenedNetwork)>, Failure> {
        let runs = |network: &Network| self.serving.iter().any(|(other, _)| other == network);
        let new = wanted.iter().filter(|network| !runs(network));
        let mut all = Vec::new();
        for network in new {
            match network.clone().open(&self.common, &mut self.interfaces) {
                Ok(opened) => all.push((network.clone(), opened)),
                Err(reason) => {
                    // Closing a listener may block.
                    reaper::run(move || drop(all), None);
                    return Err(reason);
                }
            }
        }
        Ok(all)
    }

    /// Starts the networks that were opened for it, and ends those that are not `wanted`.
    pub(super) fn change(&mut self, wanted: &[Network], opened: Vec<(Network, OpenedNetwork)>) {
        for (network, opened) in opened {
            match opened.serve() {
                Ok(serving) => self.serving.push((network, serving)),
                Err(reason) => error!("net: not started: {reason}"),
            }
        }
        let removed = |(network, _): &mut (Network, _)| !wanted.contains(network);
        for (_, serving) in self.serving.extract_if(.., removed) {
            serving.shutdown();
        }
    }

    /// Ends the networks that have lost their interface. The others go on.
    pub(super) fn check(&mut self) {
        let ended = |(_, serving): &mut (_, Serving)| serving.has_ended();
        for (_, serving) in self.serving.extract_if(.., ended) {
            error!("net: {ENDED}");
            serving.shutdown();
        }
    }

    /// Logs the counters of each network.
    pub(super) fn report(&self) {
        self.serving
            .iter()
            .for_each(|(_, serving)| serving.report());
    }

    pub(super) fn shutdown(self) {
        self.serving
            .into_iter()
            .for_each(|(_, serving)| serving.shutdown());
    }
}
