//! Whether connections of a rule send without a copy.

use std::str::FromStr;

use super::parse_error::ParseRuleError;

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

impl FromStr for ZeroCopy {
    type Err = ParseRuleError;

    fn from_str(text: &str) -> Result<ZeroCopy, ParseRuleError> {
        match text {
            "auto" => Ok(ZeroCopy::Auto),
            "always" => Ok(ZeroCopy::Always),
            "never" => Ok(ZeroCopy::Never),
            _ => Err(ParseRuleError(format!(
                "zero_copy: `{text}`: give auto, always or never"
            ))),
        }
    }
}
