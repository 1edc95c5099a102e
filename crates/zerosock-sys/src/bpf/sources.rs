//! A map of sockets with a program.

use std::os::fd::AsFd;

use super::calls;
use super::error::BpfError;
use super::maps::SockMap;
use super::program::Program;

/// Sockets for which a verdict program runs. Dropping it detaches the program.
#[derive(Debug)]
pub struct Sources {
    map: SockMap,
    program: Program,
}

impl Sources {
    /// An empty map with the program attached.
    ///
    /// # Errors
    /// See [`BpfError`].
    pub fn create(entries: u32, program: Program) -> Result<Sources, BpfError> {
        let map = SockMap::create(entries)?;
        calls::attach(program.as_fd(), map.as_fd())
            .map_err(|error| BpfError::new("the program of the map of sockets", error))?;
        Ok(Sources { map, program })
    }

    /// The sockets.
    pub fn map(&self) -> &SockMap {
        &self.map
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        // It fails after the capabilities are dropped on some kernels. The kernel detaches the
        // program as well when the map's last descriptor is closed, which follows.
        let _ = calls::detach(self.program.as_fd(), self.map.as_fd());
    }
}
