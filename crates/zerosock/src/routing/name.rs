//! Names of attached processes.

use std::fmt;
use std::str::FromStr;

/// Longest name in bytes.
pub(crate) const MAX_NAME: usize = 64;

/// The name of an attached process: 1 to 64 of the characters `A-Z a-z 0-9 . _ -`.
///
/// ```
/// use zerosock::attach::Name;
///
/// let name: Name = "db-1.eu".parse()?;
/// assert_eq!(name.as_str(), "db-1.eu");
/// assert!("no spaces".parse::<Name>().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Ord, PartialOrd, Hash)]
pub struct Name(Box<str>);

/// The text is not a valid [`Name`].
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("a name has 1 to 64 of the characters A-Z a-z 0-9 . _ -")]
pub struct NameError;

impl Name {
    /// A name from its bytes.
    pub fn new(bytes: &[u8]) -> Result<Name, NameError> {
        let allowed = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if bytes.is_empty() || bytes.len() > MAX_NAME || !bytes.iter().all(allowed) {
            return Err(NameError);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| NameError)?;
        Ok(Name(text.into()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Name, NameError> {
        Name::new(text.as_bytes())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
