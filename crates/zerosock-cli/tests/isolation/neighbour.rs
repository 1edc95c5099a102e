//! The VM that must make progress.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use super::driver::{Driver, StreamId};
use zerosock::{Address, Cid, Port};

use super::daemon::{Daemon, NEIGHBOUR};
use super::process::DEADLINE;
use super::raw::{SET_OWNER, send_by};
use super::threads::Held;

const PORT: Port = Port::new(7);
/// Bytes of a message.
const MESSAGE: usize = 64;
/// Round trips and requests while a thread is blocked.
const ROUND_TRIPS: usize = 200;
const REQUESTS: usize = 20;

pub(crate) struct Neighbour {
    /// None only between two.
    driver: Option<Driver>,
    stream: StreamId,
    listener: UnixListener,
    program: UnixStream,
}

impl Neighbour {
    pub(crate) fn new(daemon: &Daemon) -> Neighbour {
        let listener = UnixListener::bind(daemon.service(NEIGHBOUR, PORT)).unwrap();
        let mut driver = daemon.attach(NEIGHBOUR);
        let (stream, program) = connect(&mut driver, &listener);
        Neighbour {
            driver: Some(driver),
            stream,
            listener,
            program,
        }
    }

    /// Data is echoed by the host program, requests are answered, and another front-end connects,
    /// while `held` sleeps in the same call.
    pub(crate) fn goes_on_while(&mut self, daemon: &Daemon, held: &Held) {
        held.check();
        for n in 0..ROUND_TRIPS {
            self.round_trip(n as u8);
            if n % (ROUND_TRIPS / REQUESTS) == 0 {
                self.ask_features();
            }
        }
        held.check();
        self.replace_frontend(daemon);
        self.round_trip(0);
        held.check();
    }

    /// Sends a descriptor with a request that has none and is not answered.
    pub(crate) fn pass_unwanted(&mut self, fd: OwnedFd) {
        send_by(self.driver(), SET_OWNER, &[], &[fd.as_fd()]);
    }

    /// A request to the control thread, and its answer.
    pub(crate) fn ask_features(&mut self) {
        let frontend = self.driver().frontend().expect("attached");
        assert_ne!(frontend.get_features().unwrap(), 0);
    }

    fn driver(&mut self) -> &mut Driver {
        self.driver.as_mut().expect("attached")
    }

    /// A message each way.
    pub(crate) fn round_trip(&mut self, byte: u8) {
        let message = [byte; MESSAGE];
        let mut got = [0; MESSAGE];
        let stream = self.stream;
        let driver = self.driver();
        driver.wait_send(stream, &message, deadline()).unwrap();
        self.program.read_exact(&mut got).unwrap();
        self.program.write_all(&got).unwrap();
        self.driver()
            .wait_recv_exact(stream, &mut got, deadline())
            .unwrap();
        assert_eq!(got, message);
    }

    /// The front-end disconnects, another one connects, and its guest connects again.
    fn replace_frontend(&mut self, daemon: &Daemon) {
        self.driver = None;
        let mut driver = daemon.attach(NEIGHBOUR);
        (self.stream, self.program) = connect(&mut driver, &self.listener);
        self.driver = Some(driver);
    }
}

fn connect(driver: &mut Driver, listener: &UnixListener) -> (StreamId, UnixStream) {
    let to = Address::new(Cid::HOST, PORT);
    let stream = driver.wait_connect(to, deadline()).unwrap();
    let (program, _) = listener.accept().unwrap();
    program.set_read_timeout(Some(DEADLINE)).unwrap();
    (stream, program)
}

pub(crate) fn deadline() -> Instant {
    Instant::now() + DEADLINE
}
