//! Services: endpoints that share CID 2, each with ports of its own.
//!
//! # Invariants
//! - A service listens only on ports that it has claimed and the attach socket has confirmed.

use std::io;
use std::path::Path;
use std::sync::{MutexGuard, PoisonError};
use std::time::Instant;

use zerosock_proto::{Cid, Port};

use super::endpoint::Endpoint;
use super::opening::{EndpointBuilder, OpenError};
use crate::control::attach::{self, Client, ServiceRequest, Serving};
use crate::driver::Driver;

impl Endpoint {
    /// Whether this is a service of the host, opened with
    /// [`attach_as_host`](EndpointBuilder::attach_as_host).
    pub fn is_service(&self) -> bool {
        self.cid == Cid::HOST
    }

    /// Claims `port` of the host for this service: when this returns, connections of guests and
    /// processes to that port of CID 2 arrive here, until the port is [released](Self::release) or
    /// the endpoint and all its sockets are dropped. Waits for a port that another service is
    /// releasing.
    ///
    /// ```
    /// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/services.rs"));
    /// # let path = dir.path().join("attach.sock");
    /// use std::io::ErrorKind;
    /// use zerosock::Port;
    /// use zerosock::vsock::Endpoint;
    ///
    /// let one = Endpoint::builder().attach_as_host(&path)?;
    /// let two = Endpoint::builder().attach_as_host(&path)?;
    /// one.claim(Port::new(37))?;
    /// assert_eq!(two.claim(Port::new(37)).unwrap_err().kind(), ErrorKind::AddrInUse);
    /// one.release(Port::new(37))?;
    /// two.claim(Port::new(37))?;
    /// let _listener = two.listen(Port::new(37), 16)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// With an [`AttachError`](attach::AttachError) inside: `AddrInUse` when a service has it, this
    /// one included; `PermissionDenied` for a port above
    /// [`LAST_CLAIMABLE`](attach::LAST_CLAIMABLE); `ResourceBusy` beyond
    /// [`MAX_CLAIMS`](attach::MAX_CLAIMS). `InvalidInput` for an endpoint that is no service.
    pub fn claim(&self, port: Port) -> io::Result<()> {
        self.change_claims(|attach_client| attach_client.claim(&[port]))?;
        self.named().push(port);
        Ok(())
    }

    /// Releases `port` of the host. Its connections stay; later ones go to the service that claims
    /// it next, or to the host's own side.
    ///
    /// # Errors
    /// As for [`claim`](Self::claim); `AddrNotAvailable` for a port that is not claimed here.
    pub fn release(&self, port: Port) -> io::Result<()> {
        self.change_claims(|attach_client| attach_client.release(&[port]))?;
        self.named().retain(|&named| named != port);
        Ok(())
    }

    fn change_claims(
        &self,
        change: impl FnOnce(&mut Client) -> Result<(), attach::AttachError>,
    ) -> io::Result<()> {
        let attach_client = self.core.attach_client().filter(|_| self.is_service());
        let mut attach_client = attach_client.ok_or(io::ErrorKind::InvalidInput)?;
        change(&mut attach_client).map_err(|error| io::Error::new(error.kind(), error))
    }

    /// The reachable ports.
    pub(super) fn named(&self) -> MutexGuard<'_, Vec<Port>> {
        // Each change is one push or one retain.
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EndpointBuilder {
    /// Attaches at the attach socket of `zerosock serve` as a service of the host. Peers reach it
    /// at CID 2 and the [`ports`](Self::ports) that it claims, now and [later](Endpoint::claim); it
    /// connects to guests and processes from CID 2. Ports that no service has claimed belong to the
    /// host's own side of each VM. All ports are free again when the endpoint and its sockets are
    /// dropped or the process dies. The [`name`](Self::name) appears in logs and listings; the
    /// [`cid`](Self::cid) has no effect.
    ///
    /// The server decides which users may do this (`--service-uid`,
    /// [`service_uids`](attach::AttachConfig::service_uids)).
    ///
    /// ```
    /// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/services.rs"));
    /// # let path = dir.path().join("attach.sock");
    /// use std::io::Read;
    /// use std::thread;
    /// use zerosock::vsock::Endpoint;
    /// use zerosock::{Address, Cid, Port};
    ///
    /// let echo = Port::new(7);
    /// let service = Endpoint::builder().name("echo").ports([echo]).attach_as_host(&path)?;
    /// let listener = service.listen(echo, 16)?;
    /// # let attached = path.clone();
    /// # let process = thread::spawn(move || -> std::io::Result<u32> {
    /// #     let process = Endpoint::attach(&attached)?;
    /// #     let mut stream = process.connect(Address::new(Cid::HOST, echo))?;
    /// #     std::io::Write::write_all(&mut stream, b"hello")?;
    /// #     Ok(process.cid().get())
    /// # });
    /// // A guest, or a process, has connected to port 7 of CID 2.
    /// let (mut stream, peer) = listener.accept()?;
    /// let mut text = String::new();
    /// stream.read_to_string(&mut text)?;
    /// assert_eq!(text, "hello");
    /// # assert_eq!(peer.cid.get(), process.join().unwrap()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`OpenError`]; a port that another service has is
    /// [`PortTaken`](attach::AttachError::PortTaken).
    pub fn attach_as_host(mut self, path: impl AsRef<Path>) -> Result<Endpoint, OpenError> {
        let begin = Instant::now();
        let request = ServiceRequest {
            name: self.name.as_ref().map(|name| name.parse()).transpose()?,
            ports: self.request.ports.clone(),
        };
        let Serving {
            socket,
            sources,
            control,
        } = Client::serve_within(path.as_ref(), &request, self.attach_timeout)?;
        self.config.host_ports = Some(sources);
        let driver = Driver::attach_over(socket, self.device_config(begin))?;
        self.open(driver, Some(control))
    }
}
