//! Addresses of names, found by DNS and /etc/hosts on the connector's thread.
//!
//! # Invariants
//! - Requests for one name share one lookup, so the lookups in flight are bounded by the names that rules
//!   have, however many connections a guest asks for.
//! - An answer has at most [`MAX_ADDRESSES`] addresses of each family.
//! - A lookup ends after [`LIMIT`], or when no request waits for it.
//!
//! A lookup publishes the addresses of each family as soon as they are known, since the caller may
//! connect before the other family has an answer (RFC 8305, 3).

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::target::DomainName;

mod answer;
#[cfg(feature = "names")]
mod system;
#[cfg(not(feature = "names"))]
#[path = "absent.rs"]
mod system;

pub(crate) use answer::{Family, LookupError, LookupResult};
pub(crate) use system::System;

/// Addresses of one family that are used of an answer.
pub(crate) const MAX_ADDRESSES: usize = 16;
/// Time of a lookup with all its retries and search domains.
const LIMIT: Duration = Duration::from_secs(30);

/// What a lookup has found so far; None for a family without an answer yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found {
    pub(crate) v4: Option<LookupResult>,
    pub(crate) v6: Option<LookupResult>,
}

impl Found {
    /// Addresses that need no lookup.
    pub(crate) fn known(addresses: &[IpAddr]) -> Self {
        let of = |v4| {
            addresses
                .iter()
                .copied()
                .filter(move |ip| ip.is_ipv4() == v4)
        };
        Found {
            v4: Some(Ok(of(true).collect())),
            v6: Some(Ok(of(false).collect())),
        }
    }

    /// What `localhost` means (RFC 6761, 6.3).
    pub(crate) fn localhost() -> Self {
        Found::known(&[Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()])
    }

    fn set(&mut self, family: Family, answer: LookupResult) {
        match family {
            Family::V4 => self.v4 = Some(answer),
            Family::V6 => self.v6 = Some(answer),
        }
    }
}

/// The lookups of one connector.
#[derive(Clone)]
pub(crate) struct Resolver {
    shared: Arc<Shared>,
}

struct Shared {
    system: System,
    /// The lookups in flight. A sender here counts as no receiver, so a lookup sees that no request waits.
    lookups: Mutex<HashMap<DomainName, watch::Sender<Found>>>,
}

impl Resolver {
    pub(crate) fn new(system: System) -> Self {
        let lookups = Mutex::default();
        Resolver {
            shared: Arc::new(Shared { system, lookups }),
        }
    }

    /// Joins the lookup of a name, or begins one. Runs on the connector's thread.
    pub(crate) fn lookup(&self, name: &DomainName) -> watch::Receiver<Found> {
        let mut lookups = self.shared.lookups();
        if let Some(found) = lookups.get(name) {
            return found.subscribe();
        }
        let (sender, receiver) = watch::channel(Found::default());
        lookups.insert(name.clone(), sender.clone());
        // An entry that cannot be spawned is dropped, and then takes the lock.
        drop(lookups);
        let entry = Entry {
            shared: self.shared.clone(),
            name: name.clone(),
        };
        tokio::spawn(entry.run(sender));
        receiver
    }

    /// The number of lookups in flight.
    #[cfg(all(test, feature = "names"))]
    fn in_flight(&self) -> usize {
        self.shared.lookups().len()
    }
}

impl Shared {
    fn lookups(&self) -> MutexGuard<'_, HashMap<DomainName, watch::Sender<Found>>> {
        self.lookups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").finish_non_exhaustive()
    }
}

/// A lookup in flight; removes itself when it ends in any way, so that its receivers see the end.
struct Entry {
    shared: Arc<Shared>,
    name: DomainName,
}

impl Entry {
    async fn run(self, found: watch::Sender<Found>) {
        let both = async {
            tokio::join!(
                self.query(Family::V6, &found),
                self.query(Family::V4, &found)
            )
        };
        tokio::select! {
            _ = both => {}
            () = tokio::time::sleep(LIMIT) => {
                let failed = || Err(LookupError::Failed("the name servers do not answer".into()));
                found.send_modify(|found| {
                    found.v4.get_or_insert_with(failed);
                    found.v6.get_or_insert_with(failed);
                });
            }
            () = found.closed() => {}
        }
    }

    async fn query(&self, family: Family, found: &watch::Sender<Found>) {
        let answer = self.shared.system.query(&self.name, family).await;
        let answer = answer.map(bounded);
        found.send_modify(|found| found.set(family, answer));
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.shared.lookups().remove(&self.name);
    }
}

/// The first addresses of an answer, each once and IPv4-mapped ones as IPv4.
fn bounded(addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    let mut kept: Vec<IpAddr> = Vec::with_capacity(addresses.len().min(MAX_ADDRESSES));
    for address in addresses {
        let address = address.to_canonical();
        if kept.len() == MAX_ADDRESSES {
            break;
        }
        if !kept.contains(&address) {
            kept.push(address);
        }
    }
    kept
}

#[cfg(test)]
mod tests;
