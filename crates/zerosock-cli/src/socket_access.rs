//! `--socket-mode` and `--socket-group`: which users may connect to the sockets that a command makes.

use clap::Args;
use rustix::fs::Gid;

use crate::failure::Failure;
use crate::group;
use crate::mode::parse_mode;
use crate::sockets::Access;

/// The flags.
#[derive(Clone, Debug, Args)]
pub(crate) struct AccessFlags {
    /// Permissions of the Unix sockets made here, octal, such as 0660 [default: 0600, or 0660 with --socket-group]
    ///
    /// The umask has no effect. To connect, a program needs write permission for the socket.
    #[arg(long, value_name = "MODE")]
    pub(crate) socket_mode: Option<String>,

    /// Group of the Unix sockets made here, a name from /etc/group or a number; its members may connect
    #[arg(long, value_name = "GROUP")]
    pub(crate) socket_group: Option<String>,
}

/// A flag with a value of no use.
#[derive(Debug, thiserror::Error)]
#[error("{option} {value}: {fix}")]
pub(crate) struct WrongAccess {
    pub(crate) option: &'static str,
    pub(crate) value: String,
    pub(crate) fix: String,
}

impl AccessFlags {
    /// The settings that the flags give.
    pub(crate) fn access(&self) -> Result<Access, WrongAccess> {
        let wrong = |option, value: &str, fix: String| WrongAccess {
            option,
            value: value.to_owned(),
            fix,
        };
        let mode = match self.socket_mode.as_deref() {
            None => None,
            Some(text) => Some(parse_mode(text).ok_or_else(|| {
                let fix = "give permission bits in octal, 0 to 0777, such as 0660";
                wrong("--socket-mode", text, fix.to_owned())
            })?),
        };
        let gid = match self.socket_group.as_deref() {
            None => None,
            Some(name) => Some(
                group::lookup(name)
                    .map_err(|reason| wrong("--socket-group", name, reason.to_string()))?,
            ),
        };
        Ok(Access {
            mode,
            gid: gid.map(Gid::from_raw),
        })
    }
}

impl From<WrongAccess> for Failure {
    fn from(wrong: WrongAccess) -> Failure {
        Failure::usage(wrong)
    }
}
