//! `forward` and `listen` in the configuration file, and the flags of the same names, parsed into
//! validated rules.
//!
//! Errors of single values are reported during parsing, so that the parser adds the line.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use rustix::fs::Mode;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer};
use zerosock::Port;
use zerosock::access::Party;
use zerosock::forward::{
    Destination, ForwardRule, ListenAddress, ListenRule, Network, RuleName, TargetTemplate,
    ZeroCopy,
};

use super::access::{self, rule_name};
use super::list::joined_by_plus;
use crate::duration;
use crate::mode::parse_mode;

/// Default idle time before TCP keepalive probes.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// The flags for the simple cases.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Connections to and from the network")]
pub(crate) struct ForwardFlags {
    /// Forward connections of all guests and processes to PORT (or FIRST-LAST) of the host to TARGET;
    /// repeat for more
    ///
    /// TARGET is tcp:HOST:PORT, udp:HOST:PORT, unix:PATH, unix-seqpacket:PATH or unix-dgram:PATH.
    /// Without :PORT it is the port that the guest connects to. Connections to tcp: and unix: are
    /// streams; the others take SOCK_SEQPACKET, udp: and unix-dgram: also datagrams. A guest reaches loopback, link-local
    /// and metadata addresses only if TARGET names the address. docs/forward.md describes these rules,
    /// and the file of --config has more options for them.
    #[arg(long, value_name = "PORT=TARGET", value_parser = parse_forward)]
    pub(crate) forward: Vec<ForwardRule>,

    /// Listen on ADDRESS and connect clients to PORT of the guest or process CID; repeat for more
    ///
    /// ADDRESS is tcp:ADDRESS:PORT, unix:PATH or unix-seqpacket:PATH. Instead of CID, name:NAME is the
    /// attached process of this name and `host` the service that has claimed PORT.
    #[arg(long, value_name = "ADDRESS=CID:PORT", value_parser = parse_listen)]
    pub(crate) listen: Vec<Listen>,
}

/// One entry of `forward`.
#[derive(Clone, Debug, Eq, PartialEq, Deserialize)]
pub(crate) struct Forward(#[serde(with = "ForwardKeys")] pub(super) ForwardRule);

/// One entry of `listen`: a [`ListenRule`] without its socket.
#[derive(Clone, Debug, Eq, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Listen {
    #[serde(default, deserialize_with = "rule_name")]
    name: Option<RuleName>,
    #[serde(deserialize_with = "parsed")]
    pub(super) on: ListenAddress,
    #[serde(deserialize_with = "parsed")]
    pub(super) to: Destination,
    #[serde(default, deserialize_with = "networks")]
    allow: Vec<Network>,
    #[serde(default, deserialize_with = "networks")]
    deny: Vec<Network>,
    #[serde(default, alias = "idle-timeout", deserialize_with = "limit")]
    idle_timeout: Option<Duration>,
    #[serde(default = "keepalive", deserialize_with = "or_off")]
    keepalive: Option<Duration>,
    #[serde(default, alias = "proxy-protocol")]
    proxy_protocol: bool,
    #[serde(default, alias = "max-connections", deserialize_with = "connections")]
    max_connections: Option<u32>,
    #[serde(default, alias = "zero-copy", deserialize_with = "parsed")]
    zero_copy: ZeroCopy,
    /// Permissions of a Unix socket; `None`: those of the other sockets.
    #[serde(default, deserialize_with = "mode")]
    pub(super) mode: Option<Mode>,
}

impl Listen {
    fn new(on: ListenAddress, to: Destination) -> Listen {
        Listen {
            name: None,
            on,
            to,
            allow: Vec::new(),
            deny: Vec::new(),
            idle_timeout: None,
            keepalive: Some(KEEPALIVE),
            proxy_protocol: false,
            max_connections: None,
            zero_copy: ZeroCopy::Auto,
            mode: None,
        }
    }

    /// The rule in the log: its name, or its text.
    pub(super) fn shown(&self) -> String {
        match &self.name {
            Some(name) => name.to_string(),
            None => format!("{}={}", self.on, self.to),
        }
    }

    /// The rule of the library. `None`: with the socket that the daemon has for its address.
    pub(super) fn rule(&self, socket: Option<OwnedFd>) -> ListenRule {
        ListenRule {
            name: self.name.clone(),
            on: self.on.clone(),
            socket,
            to: self.to.clone(),
            allow: self.allow.clone(),
            deny: self.deny.clone(),
            idle_timeout: self.idle_timeout,
            keepalive: self.keepalive,
            proxy_protocol: self.proxy_protocol,
            max_connections: self.max_connections,
            zero_copy: self.zero_copy,
        }
    }
}

/// The keys of a [`ForwardRule`].
#[derive(Deserialize)]
#[serde(remote = "ForwardRule", deny_unknown_fields)]
struct ForwardKeys {
    #[serde(default, deserialize_with = "rule_name")]
    name: Option<RuleName>,
    #[serde(default = "any", deserialize_with = "access::parties")]
    from: Vec<Party>,
    #[serde(rename = "port", deserialize_with = "ports")]
    ports: RangeInclusive<Port>,
    #[serde(deserialize_with = "parsed")]
    to: TargetTemplate,
    #[serde(default, deserialize_with = "networks")]
    allow: Vec<Network>,
    #[serde(default, deserialize_with = "networks")]
    deny: Vec<Network>,
    #[serde(default, alias = "connect-timeout", deserialize_with = "limit")]
    connect_timeout: Option<Duration>,
    #[serde(default, alias = "idle-timeout", deserialize_with = "limit")]
    idle_timeout: Option<Duration>,
    #[serde(default = "keepalive", deserialize_with = "or_off")]
    keepalive: Option<Duration>,
    #[serde(default, alias = "proxy-protocol")]
    proxy_protocol: bool,
    #[serde(default, alias = "max-connections", deserialize_with = "connections")]
    max_connections: Option<u32>,
    #[serde(default, alias = "zero-copy", deserialize_with = "parsed")]
    zero_copy: ZeroCopy,
}

fn any() -> Vec<Party> {
    vec![Party::Any]
}

fn keepalive() -> Option<Duration> {
    Some(KEEPALIVE)
}

fn parse_forward(text: &str) -> Result<ForwardRule, String> {
    let (ports, to) = text
        .split_once('=')
        .ok_or("give PORT=TARGET, such as 8080=tcp:example.com:80")?;
    let to: TargetTemplate = to.parse().map_err(|error| format!("{error}"))?;
    Ok(ForwardRule::new(parse_ports(ports)?, to))
}

fn parse_listen(text: &str) -> Result<Listen, String> {
    // A path may contain `=`, a destination does not.
    let (on, to) = text
        .rsplit_once('=')
        .ok_or("give ADDRESS=CID:PORT, such as tcp:127.0.0.1:2222=3:22")?;
    let on = on.parse().map_err(|error| format!("{error}"))?;
    let to = to.parse().map_err(|error| format!("{error}"))?;
    Ok(Listen::new(on, to))
}

fn parse_ports(text: &str) -> Result<RangeInclusive<Port>, String> {
    access::range(text)
        .ok_or_else(|| format!("`{text}` is no port; give a port such as 8080, or 8000-8010"))
}

fn ports<'de, D: Deserializer<'de>>(input: D) -> Result<RangeInclusive<Port>, D::Error> {
    let text = joined_by_plus(input)?.unwrap_or_default();
    parse_ports(&text).map_err(D::Error::custom)
}

fn parsed<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(input: D) -> Result<T, D::Error> {
    let text = String::deserialize(input)?;
    text.parse().map_err(D::Error::custom)
}

fn networks<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<Network>, D::Error> {
    let text = joined_by_plus(input)?.unwrap_or_default();
    let items = text.split('+').map(str::trim).filter(|it| !it.is_empty());
    items
        .map(|item| item.parse().map_err(D::Error::custom))
        .collect()
}

fn mode<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Mode>, D::Error> {
    let text = String::deserialize(input)?;
    match parse_mode(&text) {
        Some(mode) => Ok(Some(mode)),
        None => Err(D::Error::custom(format!(
            "mode: `{text}`: give permission bits in octal, 0 to 0777, such as '0660'"
        ))),
    }
}

/// A limit of 0 would let nothing through.
fn connections<'de, D: Deserializer<'de>>(input: D) -> Result<Option<u32>, D::Error> {
    match u32::deserialize(input)? {
        0 => Err(D::Error::custom(
            "max_connections: 0: give at least 1, or remove the rule",
        )),
        most => Ok(Some(most)),
    }
}

/// Seconds, more than 0.
fn limit<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Duration>, D::Error> {
    match input.deserialize_any(Seconds)? {
        Duration::ZERO => Err(D::Error::custom(
            "0: give seconds, such as 5 or 0.5, or leave the key out",
        )),
        limit => Ok(Some(limit)),
    }
}

/// Seconds; 0: off.
fn or_off<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Duration>, D::Error> {
    let span = input.deserialize_any(Seconds)?;
    Ok((!span.is_zero()).then_some(span))
}

/// A number of seconds in the file.
pub(super) struct Seconds;

impl Visitor<'_> for Seconds {
    type Value = Duration;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a number of seconds such as 5 or 0.5")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Duration, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Duration, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
        duration::parse(text).map_err(E::custom)
    }
}

#[cfg(test)]
#[path = "forward_tests.rs"]
mod tests;
