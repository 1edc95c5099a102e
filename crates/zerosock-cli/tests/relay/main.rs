//! `zerosock relay` as a process: which ends go with which, its command line, log and signals, and what
//! connections cost it.

mod attached;
mod command;
mod descriptors;
mod log;
mod matrix;
mod names;
#[path = "../process/mod.rs"]
mod process;
mod resources;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use process::{DEADLINE, Running, wait_until, zerosock};
use zerosock_sys::fd_passing;

fn relay(words: &[&str]) -> Command {
    let mut command = zerosock();
    command.arg("relay").args(words);
    command
}

/// Has a relay behave as on a kernel that cannot refuse descriptors. False if the kernel can and the build
/// under test is a release, which does not permit that.
fn receives_descriptors(command: &mut Command) -> bool {
    command.env(fd_passing::WITHOUT_PASSRIGHTS, "1");
    let (socket, _other) = UnixStream::pair().unwrap();
    fd_passing::READS_WITHOUT_PASSRIGHTS || !fd_passing::refuse_rights(&socket).unwrap()
}

/// What does not run without [`receives_descriptors`].
fn skip_receiving(test: &str) {
    let reason = "a release build has the kernel refuse descriptors";
    let _ = writeln!(std::io::stderr(), "\nSKIPPED descriptors: {test}: {reason}");
}

/// Starts a relay and waits until it listens; its first address, if it has one.
fn start(words: &[&str]) -> (Running, Option<SocketAddr>) {
    start_command(&mut relay(words))
}

fn start_command(command: &mut Command) -> (Running, Option<SocketAddr>) {
    let running = Running::start(command);
    wait_until("the relay", || running.stderr().contains("relaying"));
    let said = running.stderr();
    let address = said
        .split_once("address=")
        .and_then(|(_, rest)| rest.split_whitespace().next())
        .and_then(|address| address.parse().ok());
    (running, address)
}

fn limited(socket: TcpStream) -> TcpStream {
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket.set_write_timeout(Some(DEADLINE)).unwrap();
    socket
}

fn connect(address: Option<SocketAddr>) -> TcpStream {
    limited(TcpStream::connect(address.unwrap()).unwrap())
}

fn read_all(mut from: impl Read) -> Vec<u8> {
    let mut all = Vec::new();
    from.read_to_end(&mut all).unwrap();
    all
}

fn descriptors(running: &Running) -> usize {
    let path = format!("/proc/{}/fd", running.child.id());
    fs::read_dir(path).unwrap().count()
}

fn terminate(running: Running) -> String {
    running.signal("TERM");
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended.stderr
}

/// A daemon of processes that attach.
fn serve(dir: &Path) -> (Running, String) {
    let attach = dir.join("attach");
    let running = Running::start(zerosock().arg("serve").arg("--attach-socket").arg(&attach));
    wait_until("the attach socket", || attach.exists());
    (running, attach.display().to_string())
}

fn pattern(length: usize) -> Vec<u8> {
    let mut state = 1u64;
    let words = (0..length.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(length).collect()
}
