//! Why redirection cannot be set up, and what to do about it.

use std::fmt;
use std::io;

use super::calls::Rejected;
use super::capabilities;
use crate::kernel_release::release;

/// Why a map or a program could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// The kernel has no bpf(2), or not the kind of map or program: Linux before 5.13, or built without
    /// it.
    #[error("{what}: this kernel does not support it; Linux 5.13 or later is needed")]
    NotSupported {
        /// What was to be made.
        what: &'static str,
    },
    /// This process may not.
    #[error("{what}: {denial}")]
    Denied {
        /// What was to be made.
        what: &'static str,
        /// The reason, as far as it can be seen from here.
        denial: Denial,
    },
    /// The verifier of the kernel has rejected the program.
    #[error("{what}: the kernel rejects the program: {error}; the verifier says:\n{log}")]
    Rejected {
        /// Which program.
        what: &'static str,
        /// The error of bpf(2).
        error: io::Error,
        /// The log of the verifier.
        log: String,
    },
    /// Another failure of the system.
    #[error("{what}: {error}")]
    System {
        /// What was to be made.
        what: &'static str,
        /// The error of the call.
        error: io::Error,
    },
}

/// Why bpf(2) says EPERM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Denial {
    /// The calling thread lacks capabilities.
    Capabilities {
        /// Their names.
        missing: Vec<&'static str>,
        /// The value of the sysctl kernel.unprivileged_bpf_disabled, if it is not 0: then CAP_BPF is
        /// needed for all of bpf(2).
        unprivileged_disabled: Option<u8>,
    },
    /// RLIMIT_MEMLOCK, in bytes, is too low. Kernels before 5.11 count maps as locked memory.
    MemoryLock(Option<u64>),
    /// The thread has the capabilities: something else refuses, as a seccomp filter or a security
    /// module.
    Other,
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Denial::Capabilities {
                missing,
                unprivileged_disabled,
            } => {
                write!(f, "not permitted without {}", missing.join(" and "))?;
                if let Some(value) = unprivileged_disabled
                    && missing.contains(&"CAP_BPF")
                {
                    write!(f, " (kernel.unprivileged_bpf_disabled is {value})")?;
                }
                Ok(())
            }
            Denial::MemoryLock(limit) => {
                let limit = limit.map_or("too low".to_owned(), |bytes| format!("{bytes} bytes"));
                write!(
                    f,
                    "the limit of locked memory (RLIMIT_MEMLOCK) is {limit}; raise it"
                )
            }
            Denial::Other => f.write_str(
                "not permitted although the capabilities are there: a seccomp filter or a security \
                 module refuses bpf(2)",
            ),
        }
    }
}

impl BpfError {
    /// From the error of a call that was to make `what`.
    pub(crate) fn new(what: &'static str, error: io::Error) -> BpfError {
        match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => BpfError::Denied {
                what,
                denial: Denial::find(),
            },
            Some(libc::ENOSYS | libc::EINVAL | libc::EOPNOTSUPP) => BpfError::NotSupported { what },
            _ => BpfError::System { what, error },
        }
    }

    /// For a program that was not loaded.
    pub(crate) fn of_program(what: &'static str, rejected: Rejected) -> BpfError {
        match rejected {
            Rejected { error, log } if log.is_empty() => BpfError::new(what, error),
            Rejected { error, log } => BpfError::Rejected { what, error, log },
        }
    }
}

impl Denial {
    fn find() -> Denial {
        let release = release();
        let missing = capabilities::missing(release);
        if !missing.is_empty() {
            let sysctl = std::fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled");
            let value = sysctl.ok().and_then(|text| text.trim().parse().ok());
            return Denial::Capabilities {
                missing,
                unprivileged_disabled: value.filter(|value| *value != 0),
            };
        }
        if release < (5, 11) {
            use rustix::process::{Resource, getrlimit};
            return Denial::MemoryLock(getrlimit(Resource::Memlock).current);
        }
        Denial::Other
    }
}

/// Whether a socket can be inserted into a map only with the capabilities that made the map: before
/// Linux 5.19.
pub fn inserting_needs_capabilities() -> bool {
    release() < (5, 19)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_object_reason_and_remedy() {
        let denied = |denial| BpfError::Denied {
            what: "the map of sockets",
            denial,
        };
        let capabilities = Denial::Capabilities {
            missing: vec!["CAP_BPF", "CAP_NET_ADMIN"],
            unprivileged_disabled: Some(2),
        };
        assert_eq!(
            denied(capabilities).to_string(),
            "the map of sockets: not permitted without CAP_BPF and CAP_NET_ADMIN \
             (kernel.unprivileged_bpf_disabled is 2)"
        );
        assert_eq!(
            denied(Denial::MemoryLock(Some(65536))).to_string(),
            "the map of sockets: the limit of locked memory (RLIMIT_MEMLOCK) is 65536 bytes; raise it"
        );
        assert!(denied(Denial::Other).to_string().contains("seccomp"));
    }

    #[test]
    fn release_of_the_running_kernel_is_known() {
        assert!(release() > (2, 6));
    }
}
