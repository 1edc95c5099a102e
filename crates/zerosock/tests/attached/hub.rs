//! A host with an attach socket, and a thread that keeps it going.

use std::ops::Deref;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerosock::vsock::{Endpoint, EndpointBuilder, Host, HostBuilder, Stream};

use super::{FOR_EVER, PORT, common, patient};

pub(crate) struct Hub {
    host: Arc<Host>,
    pub(crate) dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    pump: Option<JoinHandle<()>>,
}

impl Hub {
    pub(crate) fn new() -> Hub {
        Hub::with(|builder| builder.hold(FOR_EVER))
    }

    pub(crate) fn with(tune: impl FnOnce(HostBuilder) -> HostBuilder) -> Hub {
        let dir = tempfile::tempdir().unwrap();
        let builder = Host::builder().attach(dir.path().join("attach.sock"));
        let builder = builder.vm(zerosock::Cid::new(3), dir.path().join("vm.sock"));
        let host = Arc::new(tune(builder).start().unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let pump = std::thread::spawn({
            let (host, stop) = (host.clone(), stop.clone());
            move || {
                let wait = Timespec {
                    tv_sec: 0,
                    tv_nsec: 1_000_000,
                };
                while !stop.load(Ordering::Relaxed) {
                    let fd = host.as_fd();
                    let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait));
                    host.turn().unwrap();
                }
            }
        });
        Hub {
            host,
            dir,
            stop,
            pump: Some(pump),
        }
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
        tune(Endpoint::builder().name(name))
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

    /// Connects to the process called `name`, which is only just starting.
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

impl Drop for Hub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(pump) = self.pump.take() {
            let _ = pump.join();
        }
    }
}
