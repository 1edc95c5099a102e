//! A SIGBUS handler for guest memory that its owner truncates.
//!
//! Guest memory is a file of the VMM. When the VMM truncates it, an access to a page beyond the new
//! end raises SIGBUS, which by default ends the process and all its other VMs. The handler calls
//! [`zerosock_ring::handle_fault`]: if the fault is in guest memory, it maps anonymous memory there and marks
//! the guest memory as lost, and the access continues. The handler passes any other SIGBUS to the
//! handler that was installed before.
//!
//! The handler of Rust's standard library restores the default action when it is called for
//! anything but a stack overflow. So this handler is no longer installed after a SIGBUS that
//! another process sent.
//!
//! System calls on truncated memory raise no signal; they fail with EFAULT.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use libc::{c_int, c_void, sigaction, siginfo_t};

/// The action that was installed before ours. Set before ours is installed, because the handler
/// reads it.
static PREVIOUS: OnceLock<sigaction> = OnceLock::new();

/// The result of the installation: nothing, or an errno.
static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();

/// si_code: access beyond the end of the mapped object.
const BUS_ADRERR: c_int = 2;
/// si_code: access to a page with a hardware memory error.
const BUS_MCEERR_AR: c_int = 4;

/// Installs the handler for the whole process. Later calls return the result of the first one. A
/// handler that the embedding program installs later replaces this one, and must call it for faults
/// that it does not handle.
///
/// # Errors
/// Errors of sigaction(2).
pub fn install() -> io::Result<()> {
    let installed = INSTALLED.get_or_init(|| {
        fetch()
            .and_then(|action| {
                PREVIOUS.get_or_init(|| action);
                replace()
            })
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))
    });
    installed.map_err(io::Error::from_raw_os_error)
}

/// The current action.
fn fetch() -> io::Result<sigaction> {
    let mut action = MaybeUninit::<sigaction>::uninit();
    // SAFETY: without a new action the call changes nothing; the kernel fills `action` if it
    // returns 0.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), action.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so `action` is filled.
    Ok(unsafe { action.assume_init() })
}

fn replace() -> io::Result<()> {
    // SAFETY: `sigaction` consists of integers, an optional function pointer and a signal set,
    // for which all zeroes is a value (an empty mask on Linux).
    let mut action: sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_sigbus;
    action.sa_sigaction = handler as usize;
    // Uses the alternate stack, if the thread has one: a stack overflow may arrive as SIGBUS, and
    // the previous handler handles it.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `handler` has the signature that SA_SIGINFO asks for, is async-signal-safe (see
    // there) and lives for the whole program.
    if unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The handler. Calls only async-signal-safe functions: `handle_fault`, as documented there;
/// `OnceLock::get`, an atomic load; the previous handler; sigaction(2). Preserves errno.
extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: returns the address of the errno of this thread; no reference to it is formed, and no
    // other thread uses it.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    // SAFETY: with SA_SIGINFO the kernel passes a valid `siginfo_t`; `si_addr` reads the union
    // member that SIGBUS fills when the code says that the kernel raised it for an access.
    let fault = unsafe {
        match (*info).si_code {
            BUS_ADRERR | BUS_MCEERR_AR => Some((*info).si_addr() as usize),
            _ => None,
        }
    };
    // SAFETY: this is the handler, on the thread that faulted; the kernel gave the address of the
    // access, and the code says that this thread made the access and no process sent the signal.
    let handled = fault.is_some_and(|addr| unsafe { zerosock_ring::handle_fault(addr) });
    if !handled {
        chain(signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *errno = saved };
}

/// Calls the previous handler, or restores the default action.
fn chain(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    match PREVIOUS.get() {
        Some(previous)
            if previous.sa_sigaction != libc::SIG_DFL && previous.sa_sigaction != libc::SIG_IGN =>
        {
            if previous.sa_flags & libc::SA_SIGINFO != 0 {
                // SAFETY: an action with SA_SIGINFO that is neither of the two special values
                // holds a function of this signature; it was installed by the program for this
                // signal and gets the arguments that the kernel made for it.
                let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                    unsafe { std::mem::transmute(previous.sa_sigaction) };
                handler(signal, info, context);
            } else {
                // SAFETY: as above, without SA_SIGINFO: the function takes the signal alone.
                let handler: extern "C" fn(c_int) =
                    unsafe { std::mem::transmute(previous.sa_sigaction) };
                handler(signal);
            }
        }
        // Default, or ignored, which the kernel treats as default for a fault: restores the default
        // action. The access faults again when the handler returns, and ends the process. For a
        // SIGBUS sent by kill(2), raise(3) sends it again, and it is delivered when the handler
        // returns.
        _ => {
            // SAFETY: `sigaction` as in `replace`; the default action needs no function. raise(3)
            // is async-signal-safe.
            unsafe {
                let mut action: sigaction = std::mem::zeroed();
                action.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &action, ptr::null_mut());
                libc::raise(signal);
            }
        }
    }
}
