//! The archive format "newc" of cpio, as the kernel unpacks it at boot.
//!
//! Format: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel. Every
//! entry is a header of 110 hexadecimal characters, the name with its NUL, and the data, each
//! padded to four bytes; an entry named `TRAILER!!!` ends the archive.

use std::collections::BTreeSet;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const SYMLINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// An archive under construction. Parent directories are made as needed; everything belongs
/// to root.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    inode: u32,
    directories: BTreeSet<String>,
}

impl Archive {
    /// An executable file. `path` has no leading slash, as everywhere here.
    pub fn program(&mut self, path: &str, data: &[u8]) {
        self.parents(path);
        self.entry(path, PROGRAM, (0, 0), data);
    }

    /// A symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) {
        self.parents(path);
        self.entry(path, SYMLINK, (0, 0), target.as_bytes());
    }

    /// A character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.parents(path);
        self.entry(path, CHARACTER_DEVICE, (major, minor), &[]);
    }

    /// A directory.
    pub fn directory(&mut self, path: &str) {
        self.parents(path);
        if self.directories.insert(path.to_owned()) {
            self.entry(path, DIRECTORY, (0, 0), &[]);
        }
    }

    /// The finished archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn parents(&mut self, path: &str) {
        for (at, _) in path.match_indices('/') {
            let parent = &path[..at];
            if self.directories.insert(parent.to_owned()) {
                self.entry(parent, DIRECTORY, (0, 0), &[]);
            }
        }
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), data: &[u8]) {
        self.inode += 1;
        let links = 1;
        let fields = [
            self.inode,
            mode,
            0, // user
            0, // group
            links,
            0, // modification time
            data.len() as u32,
            0,
            0, // the device that holds the file
            device.0,
            device.1,
            path.len() as u32 + 1,
            0, // checksum, unused in newc
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
#[path = "cpio_tests.rs"]
mod tests;
