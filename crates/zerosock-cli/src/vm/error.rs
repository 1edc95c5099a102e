//! Errors of making what a guest boots.

use std::io;
use std::path::PathBuf;

/// Why there is no kernel or file system to boot.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The cache cannot be written.
    #[error("cache {path}: {source}")]
    Cache {
        /// The directory or file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A package is not available: a tool is missing or failed.
    #[error("package {package}: {what}\n  to get it, run: {fix}")]
    Package {
        /// The Debian package.
        package: String,
        /// What went wrong.
        what: String,
        /// The command that fixes it.
        fix: String,
    },
    /// A package or directory contains no kernel.
    #[error("{0}: no boot/vmlinuz-* with lib/modules/* in it")]
    Empty(PathBuf),
    /// The file is no kernel image, or of unknown release.
    #[error("--kernel {0}: not a Linux boot image; pass a vmlinuz")]
    Kernel(PathBuf),
    /// No modules for it.
    #[error("--kernel: no modules at {0}; pass --modules DIR, the /lib/modules/{1} of that kernel")]
    Modules(PathBuf, String),
    /// The kernel has no vsock.
    #[error("kernel {0} has no module {1}, and it is not built in")]
    Missing(String, &'static str),
    /// A module could not be unpacked.
    #[error("{path}: {what}; install {tool}")]
    Unpack {
        /// The compressed module.
        path: PathBuf,
        /// The program that unpacks it.
        tool: &'static str,
        /// What went wrong.
        what: String,
    },
    /// A file cannot be read.
    #[error("{0}: {1}")]
    Read(PathBuf, io::Error),
    /// Not a program for this architecture.
    #[error("{0}: not a 64-bit ELF program")]
    Format(PathBuf),
    /// The libraries of a program could not be determined.
    #[error("{0}: {1}")]
    Libraries(PathBuf, String),
}
