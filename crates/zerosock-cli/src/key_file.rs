//! The file with the key of a VM, which host and guest both have.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use zerosock::guest::key::GuestKey;

/// Bytes of the largest file.
const MAX_KEY: u64 = 4096;

/// Reads a key file, which only its owner may read or write. The error is the fix.
pub(crate) fn read(path: &Path) -> Result<GuestKey, String> {
    let hint = "give the path of a file with at least 16 random bytes and mode 0600";
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
    GuestKey::new(&bytes).map_err(|error| format!("{error}; {hint}"))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};

    use super::*;

    #[test]
    fn a_key_is_a_file_that_only_its_owner_may_use() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let write = |bytes: &[u8], mode| {
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            read(&path).err().unwrap_or_default()
        };
        assert_eq!(write(&[7; 16], 0o600), "");
        assert_eq!(write(&[7; 4096], 0o400), "");
        for (bytes, mode, error) in [
            (&[7; 16][..], 0o640, "mode 0640: change it to 0600"),
            (&[7; 16], 0o602, "mode 0602"),
            (&[7; 15], 0o600, "a key of 15 bytes"),
            (&[0; 32], 0o600, "zeroes"),
            (&[7; 4097], 0o600, "longer than 4096 bytes"),
        ] {
            let text = write(bytes, mode);
            assert!(text.contains(error), "{text}");
        }
        assert!(
            read(dir.path())
                .unwrap_err()
                .starts_with("not a regular file")
        );
        let text = read(&dir.path().join("none")).unwrap_err();
        assert!(text.contains("mode 0600"), "{text}");
    }
}
