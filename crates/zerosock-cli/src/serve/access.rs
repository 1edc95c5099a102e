//! `access` in the configuration file: which endpoints may connect to which others, parsed into
//! validated rules.
//!
//! Errors are reported during parsing, so that the parser adds the line.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use zerosock::access::{AccessList, Cids, Party, Ports, RangeError, Rule, RuleName, Verdict};
use zerosock::{Cid, Port};

use super::list::joined_by_plus;

/// One entry of the list.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct AccessEntry(Rule);

impl AccessEntry {
    /// The endpoints that the rule names.
    pub(super) fn parties(&self) -> impl Iterator<Item = &Party> {
        self.0.from.iter().chain(&self.0.to)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    #[serde(deserialize_with = "parties")]
    from: Vec<Party>,
    #[serde(deserialize_with = "parties")]
    to: Vec<Party>,
    #[serde(default = "Ports::all", deserialize_with = "ports")]
    ports: Ports,
    #[serde(default, deserialize_with = "rule_name")]
    name: Option<RuleName>,
}

impl<'de> Deserialize<'de> for AccessEntry {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<AccessEntry, D::Error> {
        input.deserialize_map(OneKey)
    }
}

/// An entry has one key: the verdict.
struct OneKey;

impl<'de> Visitor<'de> for OneKey {
    type Value = AccessEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`allow: {from: ..., to: ..., ports: ...}`, or `deny:` with the same")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<AccessEntry, A::Error> {
        let key: Option<String> = map.next_key()?;
        let verdict = match key.as_deref() {
            Some("allow") => Verdict::Allow,
            Some("deny") => Verdict::Deny,
            Some(other) => return Err(A::Error::unknown_field(other, &["allow", "deny"])),
            None => return Err(A::Error::custom("neither `allow` nor `deny`: give one")),
        };
        let RawRule {
            from,
            to,
            ports,
            name,
        } = map.next_value()?;
        if let Some(key) = map.next_key::<String>()? {
            let what = format!("`{key}` beside another rule: make two entries of it");
            return Err(A::Error::custom(what));
        }
        Ok(AccessEntry(Rule {
            name,
            verdict,
            from,
            to,
            ports,
        }))
    }
}

/// The list of all entries.
pub(super) fn list(entries: Vec<AccessEntry>) -> AccessList {
    AccessList::new(entries.into_iter().map(|AccessEntry(rule)| rule))
}

/// The first group among the parties of rules that is not in `known`, with the index of the rule.
pub(super) fn unknown_group<'a, P: IntoIterator<Item = &'a Party>>(
    rules: impl IntoIterator<Item = P>,
    known: &BTreeSet<&str>,
) -> Option<(usize, &'a str)> {
    rules.into_iter().enumerate().find_map(|(index, parties)| {
        parties.into_iter().find_map(|party| match party {
            Party::Group(group) if !known.contains(group.as_str()) => Some((index, group.as_str())),
            _ => None,
        })
    })
}

const PARTIES: &str = "any, host, a CID such as 3, CIDs such as 3-9, group:NAME or name:NAME, \
                       several joined by `+` or as a list";

pub(super) fn parties<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<Party>, D::Error> {
    let text = joined_by_plus(input)?.unwrap_or_default();
    text.split('+')
        .map(|item| party(item.trim()))
        .collect::<Result<_, _>>()
        .map_err(D::Error::custom)
}

fn party(text: &str) -> Result<Party, String> {
    let wrong = |what: &dyn fmt::Display| Err(format!("`{text}` {what}; give {PARTIES}"));
    if let Some((kind, name)) = text.split_once(':') {
        return match (kind, name.parse()) {
            ("group", _) if !name.is_empty() => Ok(Party::Group(name.into())),
            ("name", Ok(name)) => Ok(Party::Name(name)),
            ("name", Err(error)) => wrong(&format!("names no process: {error}")),
            _ => wrong(&"names no endpoint"),
        };
    }
    match text {
        "any" => return Ok(Party::Any),
        "host" => return Ok(Party::Host),
        _ => {}
    }
    let Some(range) = range(text) else {
        return wrong(&"names no endpoint");
    };
    match Cids::new(*range.start(), *range.end()) {
        Ok(cids) => Ok(Party::Cids(cids)),
        Err(RangeError::Reserved) if range == (Cid::HOST..=Cid::HOST) => {
            wrong(&"is the host: write `host`")
        }
        Err(RangeError::Reserved) => {
            wrong(&"has a reserved CID; those of guests are 3 to 4294967294")
        }
        Err(error) => wrong(&error),
    }
}

/// The name of a rule of any kind.
pub(super) fn rule_name<'de, D: Deserializer<'de>>(input: D) -> Result<Option<RuleName>, D::Error> {
    let text = String::deserialize(input)?;
    let name = text.parse();
    name.map(Some)
        .map_err(|error| D::Error::custom(format!("name: `{text}`: {error}")))
}

const PORTS: &str = "a port such as 22, ports such as 6000-6010, several joined by `+` or as a \
                     list, 0 to 4294967294";

fn ports<'de, D: Deserializer<'de>>(input: D) -> Result<Ports, D::Error> {
    let text = joined_by_plus(input)?.unwrap_or_default();
    let wrong = |item: &str, what: &dyn fmt::Display| {
        D::Error::custom(format!("ports: `{item}` {what}; give {PORTS}"))
    };
    let mut ranges = Vec::new();
    for item in text.split('+').map(str::trim) {
        let range: RangeInclusive<Port> =
            range(item).ok_or_else(|| wrong(item, &"is not a port"))?;
        // One by one, to find the wrong one.
        Ports::new([range.clone()])
            .map_err(|error| wrong(item, &format!("is not a range: {error}")))?;
        ranges.push(range);
    }
    Ports::new(ranges).map_err(|error| wrong(&text, &error))
}

/// `5` or `5-9`.
pub(super) fn range<T: FromStr + Copy>(text: &str) -> Option<RangeInclusive<T>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

#[cfg(test)]
#[path = "access_tests.rs"]
mod tests;
