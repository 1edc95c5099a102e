//! Stock Linux guests that live for one run: kernel, initramfs, QEMU, and a program inside that
//! init starts.
//!
//! - [`kernel`] finds a kernel and its modules (Debian's packages, or the user's own),
//! - [`initramfs`] packs them with busybox and the program,
//! - [`qemu`] boots the result, [`accel`] remembers whether KVM is any good here,
//! - [`hybrid`] reaches the guest over the device's hybrid vsock socket.
//!
//! The demo boots its guest so, and the crate `zerosock-testkit` builds on it.
//!
//! What must hold: nothing outside the cache and the run's own directory is written, and every
//! process started here is ended when its guard is dropped, by its own id.

pub mod accel;
pub mod cache;
pub mod children;
pub mod cpio;
pub mod hybrid;
pub mod initramfs;
pub mod kernel;
pub(crate) mod parent_watchdog;
pub mod pattern;
pub mod program;
pub mod qemu;
