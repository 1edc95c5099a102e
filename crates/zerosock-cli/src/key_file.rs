//! The file with the key of a VM, which host and guest both have.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use zerosock::guest::key::GuestKey;

/// Bytes of the largest file.
const MAX_KEY: u64 = 4096;

/// Reads a key file, which only its owner may read or write. Returns its bytes, too. The error is the fix.
pub(crate) fn read(path: &Path) -> Result<(GuestKey, Vec<u8>), String> {
    let hint = "give the path of a file with at least 16 random bytes and mode 0600, or port-only";
    let open = || -> io::Result<(File, u32)> {
        // Opening anything else may wait.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let file = File::open(path)?;
        let mode = file.metadata()?.permissions().mode();
        Ok((file, mode & 0o777))
    };
    let (file, mode) = open().map_err(|error| format!("{error}; {hint}"))?;
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
    match GuestKey::new(&bytes) {
        Ok(key) => Ok((key, bytes)),
        Err(error) => Err(format!("{error}; {hint}")),
    }
}
