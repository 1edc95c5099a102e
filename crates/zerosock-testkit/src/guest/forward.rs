//! Tests the relay to the kernel's own AF_VSOCK, inside a guest, on the loopback CID. The daemon
//! under test also runs in the guest, with zerosock's driver half as its guest.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use zerosock::{Address, Cid, Port};
use zerosock_cli::vm::pattern::Pattern;
use zerosock_sys::vsock;

use super::stream;
use crate::driver::{Driver, DriverConfig, WaitError};

const SOCKET: &str = "/tmp/forward.vhost";
/// CID 1: the machine itself, here the guest.
const LOOPBACK: u32 = 1;
/// Port with a listener of the kernel's side.
const OUT: u32 = 7001;
/// Port without a listener.
const NOBODY: u32 = 7002;
/// Port on which the daemon listens for the driver half.
const IN: u32 = 9001;
/// Fits the buffers in between, so that one thread can send everything and then receive the echo.
const LEN: usize = 100_000;
const STEP: Duration = Duration::from_secs(30);

struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs all steps in order; the error names the failed step.
pub(super) fn run() -> io::Result<()> {
    let daemon = Command::new("/proc/self/exe")
        .args(["serve", "--guest-cid", "9", "--socket", SOCKET])
        .arg(format!("--forward-cid={LOOPBACK}"))
        .arg(format!("--forward-listen={IN}"))
        .spawn()?;
    let _daemon = Daemon(daemon);
    let mut driver = attach()?;
    to_kernel(&mut driver).map_err(step("from the driver to the kernel"))?;
    refused(&mut driver).map_err(step("refused"))?;
    from_kernel(&mut driver).map_err(step("from the kernel to the driver"))?;
    println!("forward: ok");
    Ok(())
}

fn step(name: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::other(format!("{name}: {error}"))
}

fn attach() -> io::Result<Driver> {
    let deadline = Instant::now() + STEP;
    loop {
        match Driver::attach(DriverConfig::new(SOCKET)) {
            Ok(driver) => return Ok(driver),
            // The daemon may not listen yet, and nothing signals that it does.
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            Err(error) => return Err(io::Error::other(error)),
        }
    }
}

fn host(port: u32) -> Address {
    Address {
        cid: Cid::HOST,
        port: Port::new(port),
    }
}

fn to_kernel(driver: &mut Driver) -> io::Result<()> {
    let listener = vsock::listen(vsock::CID_ANY, OUT, 8)?;
    let echo = thread::spawn(move || -> io::Result<()> {
        let (fd, _, _) = vsock::accept_blocking(&listener)?;
        stream::echo(&fd)
    });
    let deadline = Instant::now() + STEP;
    let stream = driver
        .wait_connect(host(OUT), deadline)
        .map_err(io::Error::other)?;
    let sent = Pattern::bytes(1, LEN);
    driver
        .wait_send(stream, &sent, deadline)
        .map_err(io::Error::other)?;
    let mut back = vec![0; LEN];
    driver
        .wait_recv_exact(stream, &mut back, deadline)
        .map_err(io::Error::other)?;
    same(&sent, &back)?;
    driver.close(stream);
    driver
        .wait_until(deadline, |driver| {
            (echo.is_finished() || driver.state(stream).is_none()).then_some(())
        })
        .map_err(io::Error::other)?;
    echo.join()
        .map_err(|_| io::Error::other("the echo panicked"))?
}

fn refused(driver: &mut Driver) -> io::Result<()> {
    let start = Instant::now();
    match driver.wait_connect(host(NOBODY), start + STEP) {
        Err(WaitError::Refused) if start.elapsed() < Duration::from_secs(1) => Ok(()),
        Err(WaitError::Refused) => {
            let took = start.elapsed();
            Err(io::Error::other(format!("known only after {took:?}")))
        }
        Err(other) => Err(io::Error::other(other)),
        Ok(_) => Err(io::Error::other("somebody accepted")),
    }
}

fn from_kernel(driver: &mut Driver) -> io::Result<()> {
    driver.listen(Port::new(IN), 8).map_err(io::Error::other)?;
    let client = thread::spawn(|| -> io::Result<Vec<u8>> {
        let fd: OwnedFd = vsock::connect_blocking(LOOPBACK, IN, STEP)?;
        // Only read, write and shutdown are used, which all stream sockets share.
        let mut stream = UnixStream::from(fd);
        stream.write_all(&Pattern::bytes(2, LEN))?;
        let mut back = vec![0; LEN];
        stream.read_exact(&mut back)?;
        Ok(back)
    });
    let deadline = Instant::now() + STEP;
    let stream = driver
        .wait_accept(Port::new(IN), deadline)
        .map_err(io::Error::other)?;
    let mut got = vec![0; LEN];
    driver
        .wait_recv_exact(stream, &mut got, deadline)
        .map_err(io::Error::other)?;
    same(&Pattern::bytes(2, LEN), &got)?;
    driver
        .wait_send(stream, &got, deadline)
        .map_err(io::Error::other)?;
    driver
        .wait_until(deadline, |_| client.is_finished().then_some(()))
        .map_err(io::Error::other)?
        .ok_or(io::ErrorKind::TimedOut)?;
    let back = client
        .join()
        .map_err(|_| io::Error::other("the client panicked"))??;
    same(&got, &back)
}

fn same(one: &[u8], other: &[u8]) -> io::Result<()> {
    if one == other {
        Ok(())
    } else {
        Err(io::Error::other("other bytes than were sent"))
    }
}
