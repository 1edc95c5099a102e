//! Surviving guest memory that vanishes.
//!
//! Guest memory is a file of the VMM. When the VMM truncates it, touching a page beyond the new
//! end raises SIGBUS, which by default ends the process and all its other VMs. The handler here
//! asks [`zerosock_ring::handle_fault`], which puts anonymous memory under the fault when it lies
//! in guest memory and marks that memory as lost; the access then goes on. Any other SIGBUS goes
//! to the handler that was there before, so that it looks as if we were not there.
//!
//! The handler that Rust's library installs restores the default action when it is called for
//! anything but a stack overflow. After a SIGBUS that another process sent, the guard is gone.
//!
//! System calls on vanished memory raise no signal; they answer EFAULT.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use libc::{c_int, c_void, sigaction, siginfo_t};

/// The action that was there before ours. Set before ours is installed, so that the handler always
/// finds it.
static PREVIOUS: OnceLock<sigaction> = OnceLock::new();

/// How the installation came out: nothing, or an errno.
static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();

/// si_code: beyond the end of the mapped object.
const BUS_ADRERR: c_int = 2;
/// si_code: hardware memory error that an access ran into.
const BUS_MCEERR_AR: c_int = 4;

/// Installs the handler for the whole process. The first call does it, later ones return what the
/// first did. A handler that the embedding program installs later replaces ours, and must call
/// the previous one for faults that it does not know.
///
/// # Errors
/// What sigaction(2) answers.
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

/// The present action.
fn fetch() -> io::Result<sigaction> {
    let mut action = MaybeUninit::<sigaction>::uninit();
    // SAFETY: a null new action only asks; the kernel fills `action` when it answers 0.
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
    // The alternate stack, if the thread has one: a stack overflow may arrive as SIGBUS and is
    // the previous handler's business.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `handler` has the signature that SA_SIGINFO asks for, is async-signal-safe (see
    // there) and lives for the whole program.
    if unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The handler. Calls only what is async-signal-safe: `handle_fault`, which says so of itself;
/// `OnceLock::get`, an atomic load; the previous handler; sigaction(2). Keeps errno.
extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the C library gives every thread an errno and this its address; no reference to it
    // is formed, and no other thread uses it.
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
    // access, and the code says that it is the access of this thread and no signal of somebody's.
    let handled = fault.is_some_and(|addr| unsafe { zerosock_ring::handle_fault(addr) });
    if !handled {
        chain(signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *errno = saved };
}

/// Does what would have happened without us.
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
        // Default, or ignored, which the kernel treats as default for a fault: put the default
        // back; the access faults again when we return and ends the process. A SIGBUS sent by
        // kill(2) is raised anew, and comes when this handler returns.
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
