//! Which addresses of names have accepted connections lately, and which have refused datagrams.
//!
//! # Invariants
//! - What is remembered changes the order in which the addresses of an answer are tried, and nothing else: an
//!   address is used only if the name still has it and the policy of the request permits it.
//! - At most [`MAX_NAMES`] names of each kind, and [`MAX_ADDRESSES`] addresses of a name. The names are
//!   those of rules: no guest can add one.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use super::schedule::Order;
use crate::resolve::MAX_ADDRESSES;
use crate::target::DomainName;

/// How long an address is remembered.
pub(super) const VALID: Duration = Duration::from_secs(60);
const MAX_NAMES: usize = 1024;

/// See the [module](self). Each address with the time until which it is remembered.
#[derive(Debug, Default)]
pub(super) struct AddressHistory {
    /// The address to which a stream was connected last.
    accepted: HashMap<DomainName, (IpAddr, Instant)>,
    /// Addresses that refused datagrams, in the order of time.
    refused: HashMap<DomainName, Vec<(IpAddr, Instant)>>,
}

impl AddressHistory {
    /// A stream was connected.
    pub(super) fn accepted(&mut self, now: Instant, name: &DomainName, address: IpAddr) {
        self.forget(now);
        if self.accepted.len() < MAX_NAMES || self.accepted.contains_key(name) {
            self.accepted.insert(name.clone(), (address, now + VALID));
        }
    }

    /// A datagram was refused (ICMP).
    pub(super) fn refused(&mut self, now: Instant, name: &DomainName, address: IpAddr) {
        self.forget(now);
        if self.refused.len() >= MAX_NAMES && !self.refused.contains_key(name) {
            return;
        }
        let all = self.refused.entry(name.clone()).or_default();
        all.retain(|(other, _)| *other != address);
        if all.len() == 2 * MAX_ADDRESSES {
            all.remove(0);
        }
        all.push((address, now + VALID));
    }

    /// The order of attempts for a stream.
    pub(super) fn order_of_streams(&self, now: Instant, name: &DomainName) -> Order {
        let entry = self.accepted.get(name).filter(|(_, until)| now < *until);
        Order {
            first: entry.map(|(address, _)| *address),
            last: Vec::new(),
        }
    }

    /// The order of attempts for a datagram socket.
    pub(super) fn order_of_datagrams(&self, now: Instant, name: &DomainName) -> Order {
        let entries = self.refused.get(name).into_iter().flatten();
        let valid = entries.filter(|(_, until)| now < *until);
        Order {
            first: None,
            last: valid.map(|(address, _)| *address).collect(),
        }
    }

    /// Drops the entries that have expired.
    fn forget(&mut self, now: Instant) {
        self.accepted.retain(|_, (_, until)| now < *until);
        self.refused.retain(|_, all| {
            all.retain(|(_, until)| now < *until);
            !all.is_empty()
        });
    }
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
