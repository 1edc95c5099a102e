//! A host with an attach socket, and a thread that calls its `drive`.

use std::ops::Deref;
use std::path::PathBuf;
use std::time::Instant;

use zerosock::vsock::{Endpoint, EndpointBuilder, Host, HostBuilder, Stream};

use super::{FOR_EVER, PORT, patient};
use crate::common::pump::Pumped;
use crate::common::{self, pairs};

pub(crate) struct Hub {
    host: Pumped,
    pub(crate) dir: tempfile::TempDir,
}

impl Hub {
    pub(crate) fn new() -> Hub {
        Hub::with(|builder| builder.hold(FOR_EVER))
    }

    pub(crate) fn with(tune: impl FnOnce(HostBuilder) -> HostBuilder) -> Hub {
        let dir = tempfile::tempdir().unwrap();
        let builder = Host::builder().attach(dir.path().join("attach.sock"));
        let builder = builder.queue_pairs(pairs());
        let builder = builder.vm(zerosock::Cid::new(3), dir.path().join("vm.sock"));
        let host = Pumped::new(tune(builder).start().unwrap());
        Hub { host, dir }
    }

    /// Stops the thread: from now on only the test's calls run the host.
    pub(crate) fn stop_pump(&mut self) {
        self.host.stop();
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("attach.sock")
    }

    /// The vhost-user socket of the VM with CID 3.
    pub(crate) fn vm(&self) -> PathBuf {
        self.dir.path().join("vm.sock")
    }

    pub(crate) fn process(&self, name: &str) -> Endpoint {
        self.process_with(name, |builder| builder)
    }

    pub(crate) fn process_with(
        &self,
        name: &str,
        tune: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
    ) -> Endpoint {
        tune(Endpoint::builder().queue_pairs(pairs()).name(name))
            .attach(self.path())
            .unwrap()
    }

    /// A connection from a process to the host: the host's side, and the process's.
    pub(crate) fn joined(&self, process: &Endpoint) -> (Stream, Stream) {
        let listener = self.listen(PORT, 4).unwrap();
        let to = zerosock::Address::new(zerosock::Cid::HOST, PORT);
        let theirs = process.connect(to).unwrap();
        let (ours, _) = listener.accept_timeout(common::PATIENCE).unwrap();
        (patient(ours), patient(theirs))
    }

    /// Connects to the process called `name`; tries again while it is starting.
    pub(crate) fn reach(&self, name: &str) -> Stream {
        let give_up = common::deadline();
        loop {
            match self.connect_name(name, PORT) {
                Ok(stream) => return patient(stream),
                Err(error) => assert!(Instant::now() < give_up, "{error}"),
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

impl Deref for Hub {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}
