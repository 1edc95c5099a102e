//! `zerosock serve` with two devices for processes that attach.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use zerosock::Cid;

use crate::bench::worker::touch::Fault;

/// A daemon that runs; killed when dropped.
pub(crate) struct Daemon {
    child: Child,
    place: PathBuf,
}

impl Daemon {
    /// The side that is connected to.
    pub(crate) const SERVER: Cid = Cid::new(4);
    const CLIENT: Cid = Cid::new(3);

    /// Starts it with its sockets in `place`, and waits until they are there.
    pub(crate) fn start(place: &Path) -> Result<Daemon, Fault> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command.args(["serve", "--log-level", "error"]);
        for cid in [Self::CLIENT, Self::SERVER] {
            let socket = socket(place, cid);
            let socket = socket.to_string_lossy();
            let vm = format!("guest-cid={cid},socket={socket},uds-path={socket}.hybrid");
            command.arg("--vm").arg(vm);
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let mut daemon = Daemon {
            child: child.map_err(|error| format!("zerosock serve: {error}"))?,
            place: place.to_path_buf(),
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        // It claims all sockets before it serves any: the last one's file is enough.
        while !daemon.server_socket().exists() {
            if let Ok(Some(status)) = daemon.child.try_wait() {
                return Err(format!("zerosock serve ended: {status}"));
            }
            if Instant::now() > deadline {
                return Err("zerosock serve made no socket in 20 s".to_owned());
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(daemon)
    }

    pub(crate) fn server_socket(&self) -> PathBuf {
        socket(&self.place, Self::SERVER)
    }

    pub(crate) fn client_socket(&self) -> PathBuf {
        socket(&self.place, Self::CLIENT)
    }
}

fn socket(place: &Path, cid: Cid) -> PathBuf {
    place.join(format!("vm{cid}"))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Our own child, by its handle.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
