//! Sockets passed by the service manager (LISTEN_FDS), which then owns their permissions and keeps
//! them open over a restart.
//!
//! A socket belongs to the VM with the path to which it is bound; if the paths are spelled
//! differently, its FileDescriptorName= decides: `socket-CID`, `uds-path-CID`, or without the CID
//! when there is one VM.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// Why the passed sockets cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ActivationError {
    #[error(
        "LISTEN_FDS: descriptor {index} (named `{name}`): {source}; only listening Unix stream sockets are of use"
    )]
    Unusable {
        index: usize,
        name: String,
        source: io::Error,
    },
    #[error(
        "LISTEN_FDS: the socket named `{0}` is for none of the VMs: bind it to one's path, or name it \
         socket-CID or uds-path-CID by FileDescriptorName="
    )]
    LeftOver(String),
}

/// The passed sockets that no VM has claimed yet.
#[derive(Debug, Default)]
pub(crate) struct Inherited {
    sockets: Vec<(String, UnixListener)>,
}

impl Inherited {
    /// Takes the sockets from the environment, once per process.
    pub(crate) fn take() -> Result<Inherited, ActivationError> {
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let mut passed = listenfd::ListenFd::from_env();
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
            let listener = passed.take_unix_listener(index).map_err(unusable)?;
            let Some(listener) = listener else { continue };
            match rustix::net::sockopt::socket_acceptconn(&listener) {
                Ok(true) => sockets.push((name.to_string(), listener)),
                Ok(false) => {
                    return Err(unusable(io::Error::other("it does not listen")));
                }
                Err(errno) => return Err(unusable(errno.into())),
            }
        }
        Ok(Inherited { sockets })
    }

    /// The socket bound to `path`, or else one with any of these names.
    pub(crate) fn claim(&mut self, path: &Path, names: &[String]) -> Option<UnixListener> {
        let bound_here = |listener: &UnixListener| {
            listener
                .local_addr()
                .is_ok_and(|address| address.as_pathname() == Some(path))
        };
        let index = self
            .sockets
            .iter()
            .position(|(_, listener)| bound_here(listener))
            .or_else(|| {
                self.sockets
                    .iter()
                    .position(|(name, _)| names.contains(name))
            })?;
        Some(self.sockets.swap_remove(index).1)
    }

    /// Fails if a socket is left over: a mistake in the unit file, and its clients would wait
    /// forever.
    pub(crate) fn finish(mut self) -> Result<(), ActivationError> {
        match self.sockets.pop() {
            None => Ok(()),
            Some((name, _)) => Err(ActivationError::LeftOver(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_goes_before_a_name_and_leftovers_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let sockets = vec![
            ("socket-3".to_string(), UnixListener::bind(at("a")).unwrap()),
            ("socket-3".to_string(), UnixListener::bind(at("b")).unwrap()),
            ("stray".to_string(), UnixListener::bind(at("c")).unwrap()),
        ];
        let mut inherited = Inherited { sockets };
        let path_of = |listener: UnixListener| {
            listener
                .local_addr()
                .unwrap()
                .as_pathname()
                .unwrap()
                .to_path_buf()
        };
        let names = ["socket-3".to_string()];
        assert_eq!(path_of(inherited.claim(&at("b"), &names).unwrap()), at("b"));
        assert_eq!(
            path_of(inherited.claim(&at("elsewhere"), &names).unwrap()),
            at("a")
        );
        assert!(inherited.claim(&at("elsewhere"), &names).is_none());
        let said = inherited.finish().unwrap_err().to_string();
        assert!(said.contains("`stray`"), "{said}");
    }
}
