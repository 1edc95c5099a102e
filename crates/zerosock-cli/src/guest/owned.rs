//! Sending owned buffers over the guest's own vsock sockets, by `zerosock::zc`.
//!
//! Kernel AF_VSOCK: runs only inside guests.

use std::os::fd::OwnedFd;
use std::time::Duration;

use sha2::{Digest, Sha256};
use zerosock::zc::{Backend, Copying, Outgoing, Returned, Sender};
use zerosock_cli::vm::pattern::{Pattern, hex};
use zerosock_cli::vm::protocol::Outcome;

use super::stream::errno_name;

const PATIENCE: Duration = Duration::from_secs(60);

/// Sends `len` bytes of a pattern in buffers of `chunk`, which are used again as soon as they are
/// free. An error ends it and is reported; a back-end that cannot be is an error of the command.
pub(super) fn send(
    fd: &OwnedFd,
    seed: u64,
    len: u64,
    chunk: usize,
    backend: &str,
) -> Result<Outcome, String> {
    let backend = match backend {
        "uring" => Backend::Uring,
        "error queue" => Backend::ErrorQueue,
        "copy" => Backend::Copy,
        other => return Err(format!("{other} is no back-end")),
    };
    let socket = fd.try_clone().map_err(|error| error.to_string())?;
    let builder = Sender::builder().backend(backend).capacity(8);
    let mut sender: Sender<Vec<u8>> = builder.open(socket).map_err(|error| error.to_string())?;
    let mut pattern = Pattern::new(seed);
    let mut digest = Sha256::new();
    let mut spare: Vec<Vec<u8>> = Vec::new();
    let mut outcome = Outcome::default();
    let mut left = len;
    let mut take = |sender: &mut Sender<Vec<u8>>, spare: &mut Vec<Vec<u8>>| {
        while let Some(Returned {
            buffer,
            outcome: sent,
            ..
        }) = sender.returned()
        {
            if let Err(failed) = sent {
                outcome.errno.get_or_insert(errno_name(&failed.error));
            }
            spare.push(buffer);
        }
        outcome.errno.is_none()
    };
    while left > 0 && take(&mut sender, &mut spare) {
        let now = usize::try_from(left).unwrap_or(usize::MAX).min(chunk);
        let mut buffer = spare.pop().unwrap_or_default();
        buffer.resize(now, 0);
        pattern.fill(&mut buffer);
        digest.update(&buffer);
        left -= now as u64;
        let outgoing = Outgoing::new(buffer).copying(Copying::Never);
        if let Err(refused) = sender.send(outgoing) {
            return Err(refused.to_string());
        }
    }
    let finished = sender.finish(Some(PATIENCE));
    let finished = finished.map_err(|error| error.to_string())?;
    take(&mut sender, &mut spare);
    if !finished {
        return Err("buffers are missing".to_owned());
    }
    let stats = sender.stats();
    outcome.bytes = stats.bytes;
    outcome.sha256 = Some(hex(digest.finalize().as_slice()));
    outcome.text = Some(format!(
        "{:?}: {} in place, {} notified, {} given back",
        sender.report().backend,
        stats.in_place,
        stats.notified,
        spare.len(),
    ));
    Ok(outcome)
}
