//! Why serving could not start, or ended early.

use std::io;

use rustix::io::Errno;

use super::activation::ActivationError;
use crate::failure::Failure;
use crate::sockets;
use zerosock::daemon::Shares;
use zerosock::forward::ListenAddress;

/// Why serving could not start, or ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum ServeError {
    #[error(transparent)]
    Activation(#[from] ActivationError),
    #[error(transparent)]
    Bind(#[from] sockets::BindError),
    #[error("listen: on {on}: {source}; {}", fix_of(source))]
    Listen {
        on: ListenAddress,
        source: io::Error,
    },
    #[error("no supervisor: {0}")]
    Supervisor(#[from] zerosock_supervisor::Error),
    #[error("signals cannot be caught: {0}")]
    Signals(io::Error),
    #[error("net: {0}")]
    Network(Failure),
    #[error("a worker thread has ended, see the log: its VMs have no device any more")]
    WorkerEnded,
    #[error(transparent)]
    Start(#[from] zerosock::daemon::StartError),
    #[error(
        "the limit of open files is {}, and {} VMs and users need at least {}: raise it \
         (LimitNOFILE= of the unit, ulimit -Hn)",
        .0.limit, .0.peers, .0.minimum
    )]
    FewDescriptors(Shares),
}

/// What to do about an address that cannot be listened on.
fn fix_of(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::AFNOSUPPORT) => {
            "the system or the unit does not permit this address family \
             (RestrictAddressFamilies=, docs/forward.md)"
        }
        Some(Errno::ACCESS | Errno::PERM) => {
            "choose a port from 1024 on, let systemd pass the socket, or give the daemon \
             CAP_NET_BIND_SERVICE (docs/forward.md)"
        }
        Some(Errno::ADDRNOTAVAIL) => "give an address of this machine",
        _ => "stop the program that has this address, or choose another one",
    }
}
