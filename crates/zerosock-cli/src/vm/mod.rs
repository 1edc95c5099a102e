//! Stock Linux guests that live for one run: kernel, initramfs, QEMU or user-mode Linux, and
//! an agent inside that does as the host says.
//!
//! - [`kernel`] finds a kernel and its modules (Debian's packages, or the user's own),
//! - [`initramfs`] packs them with busybox and a program that init starts,
//! - [`qemu`] and [`uml`] boot the result, [`accel`] remembers whether KVM is any good here,
//! - [`remote`] speaks to the agent over the guest's second serial port with the lines of
//!   [`protocol`]: not over vsock, so that a device that fails can still be reported on.
//!
//! What must hold: nothing outside the cache and the run's own directory is written, and every
//! process started here is ended when its guard is dropped, by its own id.

pub mod accel;
pub mod cache;
pub mod calls;
pub mod children;
pub mod cpio;
pub mod device;
pub mod hybrid;
pub mod initramfs;
pub mod kernel;
pub(crate) mod leash;
pub mod pattern;
pub mod program;
pub mod protocol;
pub mod qemu;
pub mod remote;
pub mod uml;
