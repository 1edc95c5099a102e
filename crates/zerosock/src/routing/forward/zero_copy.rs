//! Whether connections of a rule send without a copy.

use std::str::FromStr;

/// When bytes go from the memory of a guest or process to a TCP socket without a copy of the kernel
/// (MSG_ZEROCOPY). Until the peer has acknowledged them, the sender's buffers stay in use.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum ZeroCopy {
    /// On connections with large sends, while the kernel does not copy after all, and acknowledgements
    /// come in less than half of [`DaemonConfig::hold`](crate::daemon::DaemonConfig::hold).
    #[default]
    Auto,
    /// Also where the kernel copies after all: for measurements.
    Always,
    /// Never.
    Never,
}

/// The text is no [`ZeroCopy`].
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("zero_copy: `{0}`: give auto, always or never")]
pub struct ParseZeroCopyError(String);

impl FromStr for ZeroCopy {
    type Err = ParseZeroCopyError;

    fn from_str(text: &str) -> Result<ZeroCopy, ParseZeroCopyError> {
        match text {
            "auto" => Ok(ZeroCopy::Auto),
            "always" => Ok(ZeroCopy::Always),
            "never" => Ok(ZeroCopy::Never),
            _ => Err(ParseZeroCopyError(text.to_owned())),
        }
    }
}
