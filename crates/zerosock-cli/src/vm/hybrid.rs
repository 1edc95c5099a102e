//! Client of the hybrid vsock convention on the host: `CONNECT <port>`, `OK <port>`.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::PollFlags;
use zerosock_sys::wait_ready;

/// Why connecting to a guest's port failed.
#[derive(Debug, thiserror::Error)]
pub enum HybridError {
    /// The device's socket refused or failed.
    #[error("{path}: {source}")]
    Socket {
        /// The device's Unix socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The device closed the socket: no listener on the port, or the guest is not up.
    #[error("port {0} of the guest refuses connections")]
    Refused(u32),
    /// The answer is not in the hybrid vsock convention.
    #[error("expected \"OK <port>\", got {0:?}")]
    Answer(String),
}

/// Connects to `port` of the guest behind `path`; returns the stream and the port in the answer.
///
/// # Errors
/// See [`HybridError`]; no answer within `timeout` is a socket error.
pub fn connect(
    path: &Path,
    port: u32,
    timeout: Duration,
) -> Result<(UnixStream, u32), HybridError> {
    let socket = |source| HybridError::Socket {
        path: path.to_owned(),
        source,
    };
    let mut stream = UnixStream::connect(path).map_err(socket)?;
    stream.set_read_timeout(Some(timeout)).map_err(socket)?;
    match stream.write_all(format!("CONNECT {port}\n").as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            return Err(HybridError::Refused(port));
        }
        other => other.map_err(socket)?,
    }
    let mut line = Vec::new();
    let mut byte = [0];
    // Byte by byte: what follows the newline is payload.
    while line.last() != Some(&b'\n') && line.len() < 32 {
        match stream.read(&mut byte) {
            Ok(0) if line.is_empty() => return Err(HybridError::Refused(port)),
            Ok(0) => break,
            Ok(_) => line.push(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Err(HybridError::Refused(port));
            }
            Err(error) => return Err(socket(error)),
        }
    }
    stream.set_read_timeout(None).map_err(socket)?;
    let line = String::from_utf8_lossy(&line);
    line.strip_prefix("OK ")
        .and_then(|rest| rest.strip_suffix('\n'))
        .and_then(|port| port.parse().ok())
        .map(|answered| (stream, answered))
        .ok_or_else(|| HybridError::Answer(line.into_owned()))
}

/// The listener for a guest's connections to host port `port`.
///
/// # Errors
/// As binding a Unix socket.
pub fn listen(path: &Path, port: u32) -> io::Result<UnixListener> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!("_{port}"));
    let _ = std::fs::remove_file(&name);
    UnixListener::bind(PathBuf::from(name))
}

/// Accepts one connection within `timeout`.
///
/// # Errors
/// As accepting; `TimedOut` without a connection.
pub fn accept(listener: &UnixListener, timeout: Duration) -> io::Result<UnixStream> {
    if wait_ready(listener, PollFlags::IN, Some(timeout))?.is_empty() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(listener.accept()?.0)
}
