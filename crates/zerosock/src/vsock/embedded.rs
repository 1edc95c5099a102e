//! A bare host for the tests of its engine.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::{Address, Cid, Port};

use super::core::Core;
use super::endpoint;
use super::engine::EndpointStats;
use super::listener::Listener;
use super::stream::Stream;
use super::waiting::Wait;
use crate::daemon::{StartError, VmConfig};
use crate::engine::host::{HostConfig, HostEngine};

/// Not for use.
#[derive(Debug)]
pub struct Embedded {
    core: Arc<Core>,
    wait: Wait,
}

impl Embedded {
    pub fn start(vms: Vec<VmConfig>, hold: Duration, wait: Wait) -> Result<Embedded, StartError> {
        let engine = HostEngine::start(HostConfig {
            vms,
            hold,
            ..HostConfig::default()
        })?;
        let core = Core::new(Box::new(engine), None).map_err(|source| StartError::System {
            what: "share a descriptor",
            source,
        })?;
        let core = Arc::new(core);
        Ok(Embedded { core, wait })
    }

    pub fn connect(&self, peer: Address) -> io::Result<Stream> {
        endpoint::connect(&self.core, peer, self.wait, Duration::from_secs(2))
    }

    pub fn listen(&self, port: Port, backlog: usize) -> io::Result<Listener> {
        let local = Address::new(Cid::HOST, port);
        endpoint::listen(&self.core, local, backlog, self.wait)
    }

    pub fn turn(&self) -> io::Result<()> {
        endpoint::turn(&self.core)
    }

    pub fn stats(&self) -> EndpointStats {
        self.core.lock().engine().stats()
    }
}

impl AsFd for Embedded {
    fn as_fd(&self) -> BorrowedFd<'_> {
        (*self.core).as_fd()
    }
}
