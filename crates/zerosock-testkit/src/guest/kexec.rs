//! Starts another kernel from the one that runs, as `kexec -s -l` and `kexec -e` do. Debian's package of that program needs
//! libraries of Xen.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(super) enum Step {
    /// Loads a kernel, which gets the arguments of the one that runs
    Load { kernel: PathBuf, initramfs: PathBuf },
    /// Starts it
    Start,
}

/// Returns only on an error, or when a kernel is loaded.
pub(super) fn run(step: &Step) -> io::Result<()> {
    let failed = match step {
        Step::Load { kernel, initramfs } => {
            let (kernel, initramfs) = (File::open(kernel)?, File::open(initramfs)?);
            let arguments = fs::read_to_string("/proc/cmdline")?;
            let arguments = CString::new(arguments.trim())?;
            let arguments = arguments.as_bytes_with_nul();
            // SAFETY: the arguments are `arguments.len()` bytes with a zero at the end, and the call only reads them.
            unsafe {
                libc::syscall(
                    libc::SYS_kexec_file_load,
                    kernel.as_raw_fd(),
                    initramfs.as_raw_fd(),
                    arguments.len(),
                    arguments.as_ptr(),
                    0,
                )
            }
        }
        Step::Start => {
            // SAFETY: the call has no pointers.
            i64::from(unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_KEXEC) })
        }
    };
    match failed {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
