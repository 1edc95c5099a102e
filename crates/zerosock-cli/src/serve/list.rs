//! Lists in the configuration file.

use std::fmt;

use serde::{Deserialize, Deserializer};

/// A list in the file: one text joined by `+`, a single number, or a YAML list.
pub(super) fn joined_by_plus<'de, D: Deserializer<'de>>(
    input: D,
) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected one text joined by `+`, or a list")]
    enum Written {
        One(Item),
        Many(Vec<Item>),
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Item {
        Number(u64),
        Text(String),
    }
    impl fmt::Display for Item {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            match self {
                Item::Number(number) => number.fmt(f),
                Item::Text(text) => text.fmt(f),
            }
        }
    }
    let written = Option::<Written>::deserialize(input)?;
    Ok(written.map(|written| match written {
        Written::One(item) => item.to_string(),
        Written::Many(items) => items
            .iter()
            .map(Item::to_string)
            .collect::<Vec<_>>()
            .join("+"),
    }))
}
