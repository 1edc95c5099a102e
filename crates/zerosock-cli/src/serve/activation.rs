//! Sockets passed by the service manager (LISTEN_FDS), which then owns their permissions and keeps
//! them open over a restart.
//!
//! A socket belongs to the rule of `listen` with the address to which it is bound, or to the VM with the
//! path; if the paths are spelled differently, its FileDescriptorName= decides: `socket-CID`,
//! `uds-path-CID`, or without the CID when there is one VM.

use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use listenfd::ListenFd;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, getsockname, sockopt};
use zerosock::forward::ListenAddress;
use zerosock_sys::socket_file;

use crate::supervised::{self, Listener};

/// Why the passed sockets cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ActivationError {
    #[error(
        "LISTEN_FDS: descriptor {index} (named `{name}`): {source}; only listening TCP and Unix sockets are of use"
    )]
    Unusable {
        index: usize,
        name: String,
        source: io::Error,
    },
    #[error(
        "LISTEN_FDS: the socket named `{name}` is for none of the VMs and rules, and bound to {on}: bind it to \
         the path of one or to the address of a rule, or name it socket-CID or uds-path-CID by \
         FileDescriptorName="
    )]
    LeftOver { name: String, on: String },
}

/// The passed sockets that no VM or rule has claimed yet.
#[derive(Debug, Default)]
pub(crate) struct Inherited {
    sockets: Vec<Listener>,
}

impl Inherited {
    /// Takes the sockets from the environment, once per process.
    pub(crate) fn take() -> Result<Inherited, ActivationError> {
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let mut passed = ListenFd::from_env();
        let mut sockets = Vec::with_capacity(passed.len());
        for index in 0..passed.len() {
            // systemd's name of a descriptor without a name.
            let name = names
                .next()
                .filter(|name| !name.is_empty())
                .unwrap_or("unknown");
            let unusable = |source| ActivationError::Unusable {
                index,
                name: name.to_string(),
                source,
            };
            let taken = take_listener(&mut passed, index).map_err(unusable)?;
            let Some((on, socket)) = taken else { continue };
            sockets.push(Listener {
                name: name.to_string(),
                on,
                socket,
                is_made: false,
            });
        }
        Ok(Inherited { sockets })
    }

    /// Adds the sockets that the supervisor has: those of a predecessor of this process, and those that
    /// the service manager has passed to the supervisor.
    pub(crate) fn add(&mut self, left: Vec<Listener>) {
        self.sockets.extend(left);
    }

    /// All of them, for the supervisor.
    pub(crate) fn into_listeners(self) -> Vec<Listener> {
        self.sockets
    }

    /// The socket bound to this address, or else a Unix stream socket with any of these names.
    /// `reserved`: no guest reaches it by its path from now on.
    pub(crate) fn claim(
        &mut self,
        on: &ListenAddress,
        names: &[String],
        reserved: bool,
    ) -> Option<Listener> {
        let is_stream = |it: &Listener| matches!(it.on, ListenAddress::Unix(_));
        let named = |it: &Listener| is_stream(it) && names.contains(&it.name);
        let index = self.sockets.iter().position(|it| it.on == *on);
        let index = index.or_else(|| self.sockets.iter().position(named))?;
        let passed = self.sockets.swap_remove(index);
        if let ListenAddress::Unix(path) = &passed.on
            && reserved
        {
            // Fails if another mount namespace has the path: then no guest reaches it here either.
            let _ = socket_file::reserve(path);
        }
        Some(passed)
    }

    /// Fails if a socket is left over: a mistake in the unit file, and its clients would wait
    /// forever. Those of a predecessor belonged to what is not configured any more.
    pub(crate) fn finish(mut self) -> Result<(), ActivationError> {
        for left in self.sockets.extract_if(.., |it| it.is_made) {
            supervised::forget_listener(left.socket);
        }
        match self.sockets.pop() {
            None => Ok(()),
            Some(Listener {
                name, on, socket, ..
            }) => Err(ActivationError::LeftOver {
                name,
                on: abstract_name(&socket).unwrap_or_else(|| on.to_string()),
            }),
        }
    }
}

/// Takes a listening socket and its address. `None`: it was taken before.
fn take_listener(
    passed: &mut ListenFd,
    index: usize,
) -> io::Result<Option<(ListenAddress, OwnedFd)>> {
    let mut take = |family: AddressFamily, kind: SocketType| {
        let (family, kind) = (i32::from(family.as_raw()), kind.as_raw() as i32);
        passed.take_custom::<OwnedFd>(index, family, kind, "TCP or Unix socket")
    };
    // The first also takes IPv6. A socket of another kind stays for the next.
    let taken = take(AddressFamily::INET, SocketType::STREAM)
        .or_else(|_| take(AddressFamily::UNIX, SocketType::SEQPACKET))
        .or_else(|_| take(AddressFamily::UNIX, SocketType::STREAM))?;
    let Some(socket) = taken else { return Ok(None) };
    if !sockopt::socket_acceptconn(&socket)? {
        return Err(io::Error::other("it does not listen"));
    }
    let on = address_of(&socket)?;
    Ok(Some((on, socket)))
}

/// The address to which a listening socket is bound.
fn address_of(socket: &OwnedFd) -> io::Result<ListenAddress> {
    let address = getsockname(socket)?;
    if let Ok(address) = SocketAddr::try_from(address.clone()) {
        return Ok(ListenAddress::Tcp(address));
    }
    let path = SocketAddrUnix::try_from(address)?;
    // An abstract or missing name is an empty path, which no rule has.
    let bytes = path.path_bytes().unwrap_or_default();
    // The longest paths come with their terminator.
    let bytes = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    let path = PathBuf::from(OsStr::from_bytes(bytes));
    Ok(match sockopt::socket_type(socket)? {
        SocketType::SEQPACKET => ListenAddress::UnixSeqpacket(path),
        _ => ListenAddress::Unix(path),
    })
}

/// The abstract name to which a Unix socket is bound, as it is usually written.
fn abstract_name(socket: &OwnedFd) -> Option<String> {
    let address = SocketAddrUnix::try_from(getsockname(socket).ok()?).ok()?;
    let name = address.abstract_name()?.escape_ascii();
    Some(format!("@{name}"))
}

#[cfg(test)]
#[path = "activation_tests.rs"]
mod tests;
