//! Stock Linux guests for one run: kernel, initramfs, QEMU, and a program started by init.
//!
//! - [`kernel`] finds a kernel and its modules (Debian's packages, or the user's own),
//! - [`initramfs`] packs them with busybox and the program,
//! - [`qemu`] boots the result, [`accel`] remembers whether KVM works here,
//! - [`hybrid`] reaches the guest over the device's hybrid vsock socket.
//!
//! Used by the demo and by the crate `zerosock-testkit`.
//!
//! # Invariants
//! - Nothing outside the cache and the run's own directory is written.
//! - A process started here is killed, by its own id, when its guard is dropped.

pub mod accel;
pub mod cache;
pub mod children;
pub mod cpio;
pub mod error;
pub mod hybrid;
pub mod initramfs;
pub mod kernel;
pub(crate) mod parent_watchdog;
pub mod pattern;
pub mod program;
pub mod qemu;
