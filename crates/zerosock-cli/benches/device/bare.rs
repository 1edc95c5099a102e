//! The floor: a child process that does nothing but the socket half of a device's work.
//!
//! To the guest it drains the Unix socket with large reads; to the host it writes blocks of
//! 64 KiB. No device that moves bytes through that socket can need much less, and a device whose
//! CPU time is close to it has nothing left to save.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::device::cpu_seconds;
use crate::run::{Case, Check, Direction, Figures, PATIENCE, write_pattern};

/// What the child reads or writes at once.
const BLOCK: usize = 64 << 10;

/// The child's whole life: one connection at `socket`, then until its standard input ends.
pub(crate) fn child(direction: Direction, socket: &Path, bytes: u64) -> Result<(), String> {
    let listener = UnixListener::bind(socket).map_err(|error| error.to_string())?;
    let (mut stream, _) = listener.accept().map_err(|error| error.to_string())?;
    match direction {
        Direction::ToGuest => {
            let mut buffer = vec![0u8; BLOCK];
            let mut seen = 0;
            while seen < bytes {
                match stream
                    .read(&mut buffer)
                    .map_err(|error| error.to_string())?
                {
                    0 => return Err(format!("end of file after {seen} bytes")),
                    got => seen += got as u64,
                }
            }
            stream.write_all(b"!").map_err(|error| error.to_string())?;
        }
        Direction::ToHost => write_pattern(&mut stream, bytes, BLOCK)?,
    }
    let mut end = [0u8; 1];
    std::io::stdin()
        .read(&mut end)
        .map(drop)
        .map_err(|error| error.to_string())
}

struct Bare(Child);

impl Drop for Bare {
    fn drop(&mut self) {
        // Our own child, by its handle.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Measures the floor of `case`.
pub(crate) fn once(case: &Case) -> Result<Figures, String> {
    let dir = tempfile::tempdir().map_err(|error| format!("temporary directory: {error}"))?;
    let socket: PathBuf = dir.path().join("bare");
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let child = Command::new(program)
        .args([
            "--bare",
            case.direction.name(),
            "--bare-bytes",
            &case.bytes.to_string(),
        ])
        .arg("--bare-socket")
        .arg(&socket)
        .stdin(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let child = Bare(child);
    let give_up = Instant::now() + PATIENCE;
    let mut stream = loop {
        match UnixStream::connect(&socket) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > give_up => return Err(error.to_string()),
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(2)),
        }
    };
    let before = cpu_seconds(child.0.id())?;
    let start = Instant::now();
    match case.direction {
        Direction::ToGuest => {
            write_pattern(&mut stream, case.bytes, case.size)?;
            let mut done = [0u8; 1];
            stream
                .read_exact(&mut done)
                .map_err(|error| error.to_string())?;
        }
        Direction::ToHost => {
            let mut check = Check::new();
            let mut buffer = vec![0u8; 4 * BLOCK];
            while check.seen < case.bytes {
                let got = stream
                    .read(&mut buffer)
                    .map_err(|error| error.to_string())?;
                check.take(&buffer[..got])?;
            }
        }
    }
    let took = start.elapsed().as_secs_f64();
    let cpu = cpu_seconds(child.0.id())? - before;
    let bytes = case.bytes as f64;
    Ok(Figures {
        mb_s: bytes / 1e6 / took,
        cpu_s_per_gb: cpu / (bytes / 1e9),
        syscalls: None,
    })
}
