//! Names of attached processes, and of rules.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Longest name in bytes.
pub(crate) const MAX_NAME: usize = 64;

/// Longest name of a rule in bytes.
const MAX_RULE_NAME: usize = 32;

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
        let text = checked(bytes, MAX_NAME).ok_or(NameError)?;
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

/// The name of a rule, which logs and counters show in the place of the rule: 1 to 32 of the characters
/// `A-Z a-z 0-9 . _ -`. Rules of different kinds (access, forwarding, listening) can have the same name.
///
/// ```
/// use zerosock::forward::RuleName;
///
/// let name: RuleName = "web-1.eu".parse()?;
/// assert_eq!(name.as_str(), "web-1.eu");
/// assert!("no spaces".parse::<RuleName>().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct RuleName(Arc<str>);

/// The text is not a valid [`RuleName`].
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the name of a rule has 1 to 32 of the characters A-Z a-z 0-9 . _ -")]
pub struct RuleNameError;

/// Two rules of the same kind have the same name. Rules are counted from 0.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{kind}[{first}] and {kind}[{second}]: both have the name {name}; change one")]
pub struct SameName {
    /// The kind of the rules: `access`, `forward` or `listen`.
    pub kind: &'static str,
    /// The first rule.
    pub first: usize,
    /// The second rule.
    pub second: usize,
    /// The name.
    pub name: RuleName,
}

impl RuleName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RuleName {
    type Err = RuleNameError;

    fn from_str(text: &str) -> Result<RuleName, RuleNameError> {
        let text = checked(text.as_bytes(), MAX_RULE_NAME).ok_or(RuleNameError)?;
        Ok(RuleName(text.into()))
    }
}

impl fmt::Display for RuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Checks that the names of the rules of one kind differ.
pub(super) fn check_names<'a>(
    kind: &'static str,
    names: impl Iterator<Item = Option<&'a RuleName>>,
) -> Result<(), SameName> {
    let mut known = HashMap::new();
    for (second, name) in names.enumerate() {
        if let Some(name) = name
            && let Some(first) = known.insert(name, second)
        {
            return Err(SameName {
                kind,
                first,
                second,
                name: name.clone(),
            });
        }
    }
    Ok(())
}

/// The text of a name of at most `most` bytes.
fn checked(bytes: &[u8], most: usize) -> Option<&str> {
    let allowed = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    let is_name = (1..=most).contains(&bytes.len()) && bytes.iter().all(allowed);
    std::str::from_utf8(bytes).ok().filter(|_| is_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_rules_are_short_and_differ_within_a_kind() {
        let long = "a".repeat(32);
        let names = ["0", "web-1.eu_x", &long].map(|text| text.parse::<RuleName>().unwrap());
        for text in ["", " ", "a b", "a/b", "\u{e4}", "a\n", &format!("{long}a")] {
            assert!(text.parse::<RuleName>().is_err(), "{text:?}");
        }
        let [first, second, third] = names.each_ref().map(Some);
        check_names("listen", [first, None, second, None, third].into_iter()).unwrap();
        let same = check_names("listen", [None, first, second, first].into_iter()).unwrap_err();
        assert_eq!(
            same.to_string(),
            "listen[1] and listen[3]: both have the name 0; change one"
        );
    }
}
