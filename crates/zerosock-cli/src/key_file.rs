//! The file with the key of a VM, which host and guest both have.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::process::geteuid;
use zerosock::guest::key::GuestKey;

/// Bytes of the largest file.
const MAX_KEY: u64 = 4096;

/// Reads a key file, which only its owner may read or write: this user or root. The error is the fix; `port_only` is
/// what to write for no key.
pub(crate) fn read(path: &Path, port_only: &str) -> Result<GuestKey, String> {
    let hint = format!(
        "give the path of a file with at least 16 random bytes and mode 0600, or {port_only}"
    );
    let open = || -> io::Result<(File, Metadata)> {
        // Opening another kind of file does not wait, nor take a terminal.
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let mut options = File::options();
        let file = options.read(true).custom_flags(flags.bits().cast_signed());
        let file = file.open(path)?;
        let metadata = file.metadata()?;
        match metadata.is_file() {
            true => Ok((file, metadata)),
            false => Err(io::Error::other("not a regular file")),
        }
    };
    let (file, metadata) = open().map_err(|error| format!("{error}; {hint}"))?;
    let (owner, ours) = (metadata.uid(), geteuid().as_raw());
    if owner != 0 && owner != ours {
        return Err(format!(
            "user {owner} owns the file and knows the key: make a new file, of user {ours} or root"
        ));
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!(
            "other users may use the file, mode {mode:04o}: change it to 0600"
        ));
    }
    let mut bytes = Vec::new();
    let read = file.take(MAX_KEY + 1).read_to_end(&mut bytes);
    read.map_err(|error| format!("cannot be read: {error}"))?;
    if bytes.len() as u64 > MAX_KEY {
        return Err(format!("longer than {MAX_KEY} bytes; {hint}"));
    }
    GuestKey::new(&bytes).map_err(|error| format!("{error}; {hint}"))
}
