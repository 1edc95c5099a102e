//! The error of parsing a part of a rule.

/// The text is no part of a rule: no [`TargetTemplate`](super::TargetTemplate),
/// [`ListenAddress`](super::ListenAddress), [`Destination`](super::Destination) or
/// [`ZeroCopy`](super::ZeroCopy).
///
/// ```
/// use zerosock::forward::{ParseRuleError, TargetTemplate};
///
/// let error: ParseRuleError = "tcp:".parse::<TargetTemplate>().unwrap_err();
/// assert!(!error.to_string().is_empty());
/// ```
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct ParseRuleError(pub(super) String);
