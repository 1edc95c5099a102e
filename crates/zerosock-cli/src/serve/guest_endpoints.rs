//! Which endpoints the guest of a VM may have on its pages: as written, and after validation.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use zerosock::attach::Name;
use zerosock::daemon::{GuestEndpoints, GuestKey};

use super::list::joined_by_plus;
use crate::{key_file, size};

/// In the place of a key file: no key.
const PORT_ONLY: &str = "port-only";
/// More endpoints than any guest has use of; each has a device.
const MAX_NUMBER: usize = 64;

/// The value of `guest_endpoints`: the key alone, or a table.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(
    untagged,
    expecting = "expected the path of a key file, or `port-only`, or a table with the keys key, number, memory and names"
)]
pub(crate) enum RawGuestEndpoints {
    Key(PathBuf),
    Table(Table),
}

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    key: PathBuf,
    number: Option<usize>,
    #[serde(default, deserialize_with = "size::deserialize")]
    memory: Option<u64>,
    #[serde(default, deserialize_with = "joined_by_plus")]
    names: Option<String>,
}

impl RawGuestEndpoints {
    /// The key file, if there is one.
    pub(super) fn key_file(&self) -> Option<&Path> {
        let (RawGuestEndpoints::Key(key) | RawGuestEndpoints::Table(Table { key, .. })) = self;
        Some(key.as_path()).filter(|key| *key != Path::new(PORT_ONLY))
    }

    /// Validates the value, and reads the key file. The error is the wrong part of the value, and the fix.
    pub(super) fn validate(self) -> Result<GuestEndpoints, (String, String)> {
        let wrong = |value: &dyn fmt::Display, fix: String| (value.to_string(), fix);
        let table = match self {
            RawGuestEndpoints::Table(table) => table,
            RawGuestEndpoints::Key(key) => Table {
                key,
                ..Table::default()
            },
        };
        let Table {
            key,
            number,
            memory,
            names,
        } = table;
        let key = match key.to_str() {
            Some(PORT_ONLY) => GuestKey::none(),
            _ => key_file::read(&key, PORT_ONLY).map_err(|fix| wrong(&key.display(), fix))?,
        };
        let mut endpoints = GuestEndpoints::new(key);
        endpoints.most = number.unwrap_or(endpoints.most);
        if !(1..=MAX_NUMBER).contains(&endpoints.most) {
            let fix = format!("give a number of endpoints from 1 to {MAX_NUMBER}");
            return Err(wrong(&endpoints.most, fix));
        }
        endpoints.memory = memory.unwrap_or(endpoints.memory);
        if endpoints.memory < HUGE_PAGE {
            let fix = "an endpoint has at least one huge page; give bytes, such as 256M";
            return Err(wrong(&endpoints.memory, fix.into()));
        }
        let names = names.as_deref().unwrap_or_default();
        let parsed: Result<Vec<Name>, _> = match names {
            "" => Ok(Vec::new()),
            names => names.split('+').map(str::parse).collect(),
        };
        endpoints.names = parsed.map_err(|error| wrong(&names, error.to_string()))?;
        Ok(endpoints)
    }
}

/// Bytes of the smallest memory of an endpoint.
const HUGE_PAGE: u64 = 2 << 20;

#[cfg(test)]
#[path = "guest_endpoints_tests.rs"]
mod tests;
