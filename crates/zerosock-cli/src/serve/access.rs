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

/// The first group in a rule that is not in `known`, with the index of the rule.
pub(super) fn unknown_group<'a>(
    entries: &'a [AccessEntry],
    known: &BTreeSet<&str>,
) -> Option<(usize, &'a str)> {
    entries
        .iter()
        .enumerate()
        .find_map(|(index, AccessEntry(rule))| {
            let parties = rule.from.iter().chain(&rule.to);
            let mut groups = parties.filter_map(|party| match party {
                Party::Group(group) => Some(group.as_str()),
                _ => None,
            });
            groups
                .find(|group| !known.contains(group))
                .map(|group| (index, group))
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
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<AccessEntry>, String> {
        serde_yaml_ng::from_str(text).map_err(|error| error.to_string())
    }

    fn cids(first: u32, last: u32) -> Party {
        Party::Cids(Cids::new(Cid::new(first), Cid::new(last)).unwrap())
    }

    #[test]
    fn rules_are_read_in_their_order() {
        let entries = read(
            "
- allow: {from: 'name:web', to: 'group:db', ports: 5432}
- deny:
    from: [any]
    to: [host, 3, 5-9, 'group:a b']
    ports: [22, 6000-6010]
- allow: {from: host + 4, to: any}
- deny: {from: '0x7', to: any, ports: 1+0x2}
",
        )
        .unwrap();
        let port = Port::new;
        let wanted = AccessList::new([
            Rule {
                name: None,
                verdict: Verdict::Allow,
                from: vec![Party::Name("web".parse().unwrap())],
                to: vec![Party::Group("db".into())],
                ports: Ports::one(port(5432)).unwrap(),
            },
            Rule {
                name: None,
                verdict: Verdict::Deny,
                from: vec![Party::Any],
                to: vec![
                    Party::Host,
                    cids(3, 3),
                    cids(5, 9),
                    Party::Group("a b".into()),
                ],
                ports: Ports::new([port(22)..=port(22), port(6000)..=port(6010)]).unwrap(),
            },
            Rule {
                name: None,
                verdict: Verdict::Allow,
                from: vec![Party::Host, cids(4, 4)],
                to: vec![Party::Any],
                ports: Ports::all(),
            },
            Rule {
                name: None,
                verdict: Verdict::Deny,
                from: vec![cids(7, 7)],
                to: vec![Party::Any],
                ports: Ports::new([port(1)..=port(1), port(2)..=port(2)]).unwrap(),
            },
        ]);
        assert_eq!(
            unknown_group(&entries, &BTreeSet::from(["db", "a b"])),
            None
        );
        let known = BTreeSet::from(["db"]);
        assert_eq!(unknown_group(&entries, &known), Some((1, "a b")));
        assert_eq!(list(entries), wanted);
    }

    #[test]
    fn errors_name_value_and_line() {
        let rule = |from: &str, to: &str, ports: &str| {
            format!(
                "- allow: {{from: any, to: any}}\n- deny: {{from: {from}, to: {to}, ports: {ports}}}"
            )
        };
        for (text, wanted) in [
            (rule("hosts", "any", "1"), "`hosts` names no endpoint; give any, host, a CID"),
            (rule("any", "2", "1"), "`2` is the host: write `host`"),
            (rule("any", "0-9", "1"), "`0-9` has a reserved CID"),
            (rule("any", "local", "1"), "`local` has a reserved CID"),
            (rule("any", "3-any", "1"), "`3-any` has a reserved CID"),
            (rule("any", "9-8", "1"), "`9-8` the last comes before the first"),
            (rule("any", "5+", "1"), "`` names no endpoint"),
            (rule("any", "'name:a b'", "1"), "`name:a b` names no process: a name has"),
            (rule("any", "'group:'", "1"), "`group:` names no endpoint"),
            (rule("any", "any", "ssh"), "ports: `ssh` is not a port; give a port"),
            (rule("any", "any", "1+-2"), "ports: `-2` is not a port"),
            (rule("any", "any", "7-6"), "ports: `7-6` is not a range"),
            (rule("any", "any", "4294967295"), "ports: `4294967295` is not a range: an end"),
            (rule("any", "any", "4294967296"), "ports: `4294967296` is not a port"),
            (rule("any", "any", "[]"), "ports: `` is not a port"),
            ("- allow: {from: any, to: any}\n- deny: {from: any}".into(), "missing field `to`"),
            ("- allow: {from: any, to: any}\n- {}".into(), "neither `allow` nor `deny`"),
            ("- allow: {from: any, to: any}\n- permit: {}".into(), "unknown field `permit`"),
            (
                "- allow: {from: any, to: any}\n- {allow: {from: any, to: any}, deny: {from: any, to: any}}"
                    .into(),
                "`deny` beside another rule",
            ),
        ] {
            let error = read(&text).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
            assert!(error.contains("line 2"), "{text}: {error}");
        }
    }
}
