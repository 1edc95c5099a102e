//! Shares of what a process has once and its peers use: file descriptors and address space.
//!
//! A [`Budget`] is what there is for all peers together, an [`Account`] what one peer uses of it,
//! and a [`Permit`] one use, which ends when it is dropped. Peers that use one share, such as a VM and
//! the host programs that connect to it, have accounts that are [parts](Account::part) of it: what one
//! of them sends and does not let close keeps nothing of the others from being received.
//!
//! # Shares of descriptors
//! Half of the descriptors is divided by the number of peers that are expected: that many each
//! account is guaranteed. The other half is common: it is given to whichever account asks first
//! once its own part is used up. So one peer can borrow, but never what another one is guaranteed,
//! and nothing that has been given has to be taken back.
//!
//! # Descriptors that are not counted
//! What a peer sends has a number in this process before it can be counted, and keeps it until the
//! reaper has closed it, also if the share of the peer is used up. Such descriptors take numbers
//! from all that there are for peers ([`Limits::numbers`]), as the counted ones do. Before a
//! message is received, numbers for as many descriptors as it can have are
//! [reserved](Account::reserve_message): without free numbers, the kernel would close the
//! descriptors in the receiving thread.
//!
//! # Mapped memory
//! Each account has a limit of its own, and all together have one.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Jobs of one peer that may wait for its own stuck ones before nothing more is received from it. A
/// message can bring 253 more. Also the number of uncounted descriptors from which on a peer has to
/// leave numbers for a message of another one.
pub const MAX_DEFERRED: usize = 32;
/// The most descriptors in one message (SCM_MAX_FD of the kernel).
pub const MAX_FDS: usize = 253;
/// Descriptors of one peer that may wait to be closed without counting against its share.
pub const MAX_UNCOUNTED: usize = 4096;

/// What there is for all peers together.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Limits {
    /// File descriptors.
    pub descriptors: u64,
    /// Descriptor numbers: for `descriptors`, and for those that are received and not counted.
    pub numbers: u64,
    /// Bytes of peers' memory that are mapped.
    pub mapped: u64,
    /// Bytes of one peer's memory that are mapped.
    pub mapped_each: u64,
}

impl Limits {
    /// No limits.
    pub const NONE: Limits = Limits {
        descriptors: u64::MAX,
        numbers: u64::MAX,
        mapped: u64::MAX,
        mapped_each: u64::MAX,
    };
}

/// Why there is no permit.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Exceeded {
    /// The account's guaranteed part and the common part are used up.
    #[error(
        "{used} descriptors are in use: the share of {guaranteed} is used up, and nothing is left of \
         the {common} that all share (RLIMIT_NOFILE)"
    )]
    Descriptors {
        /// Descriptors of the account that are in use.
        used: u64,
        /// What it is guaranteed.
        guaranteed: u64,
        /// What all accounts share beyond that.
        common: u64,
    },
    /// The memory of one peer.
    #[error(
        "{asked} bytes of memory beside the {used} that are mapped, at most {limit} for one peer"
    )]
    Mapped {
        /// Bytes that were asked for.
        asked: u64,
        /// Bytes of the account that are mapped.
        used: u64,
        /// The limit.
        limit: u64,
    },
    /// The memory of all peers.
    #[error(
        "{asked} bytes of memory beside the {used} of all peers that are mapped, at most {limit}"
    )]
    MappedByAll {
        /// Bytes that were asked for.
        asked: u64,
        /// Bytes of all accounts that are mapped.
        used: u64,
        /// The limit.
        limit: u64,
    },
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: Limits,
    /// Descriptors that each account is guaranteed, while there are no more accounts than
    /// expected.
    share: u64,
    /// Accounts that are expected.
    accounts: usize,
    numbers: Arc<Numbers>,
    used: Mutex<Used>,
}

/// Descriptor numbers of one or more budgets.
#[derive(Debug)]
struct Numbers {
    limit: u64,
    /// Those in use, counted against a share or not, and those reserved for messages.
    used: AtomicU64,
}

impl Numbers {
    fn add(&self, count: u64) {
        self.used.fetch_add(count, Ordering::Relaxed);
    }

    fn sub(&self, count: u64) {
        self.used.fetch_sub(count, Ordering::Relaxed);
    }

    /// Whether `count` are free beyond those in use.
    fn has(&self, count: u64) -> bool {
        let used = self.used.load(Ordering::Relaxed);
        self.limit.saturating_sub(used) >= count
    }
}

#[derive(Debug, Default)]
struct Used {
    /// Sum of what the accounts are guaranteed.
    guaranteed: u64,
    /// Descriptors in use beyond what is guaranteed.
    common: u64,
    mapped: u64,
    /// Descriptors that were refused.
    refused: u64,
}

impl Budget {
    /// A budget for so many accounts. More can be opened: they are guaranteed what is left.
    pub fn new(limits: Limits, accounts: usize) -> Budget {
        let numbers = Numbers {
            limit: limits.numbers,
            used: AtomicU64::new(0),
        };
        Budget::with(limits, accounts, Arc::new(numbers))
    }

    /// A budget with limits of its own for so many accounts, except that both budgets together have
    /// the descriptor numbers of this one ([`Limits::numbers`]).
    pub fn beside(&self, limits: Limits, accounts: usize) -> Budget {
        Budget::with(limits, accounts, Arc::clone(&self.0.numbers))
    }

    fn with(limits: Limits, accounts: usize, numbers: Arc<Numbers>) -> Budget {
        let share = limits.descriptors / 2 / accounts.max(1) as u64;
        Budget(Arc::new(Shared {
            limits,
            share,
            accounts,
            numbers,
            used: Mutex::default(),
        }))
    }

    /// A budget that refuses nothing.
    pub fn unlimited() -> Budget {
        Budget::new(Limits::NONE, usize::MAX)
    }

    /// What there is.
    pub fn limits(&self) -> Limits {
        self.0.limits
    }

    /// Descriptors that each of the expected accounts is guaranteed.
    pub fn share(&self) -> u64 {
        self.0.share
    }

    /// Accounts that are expected.
    pub fn accounts(&self) -> usize {
        self.0.accounts
    }

    /// Descriptors of all accounts that were refused.
    pub fn refused(&self) -> u64 {
        self.0.lock().refused
    }

    /// Opens an account.
    pub fn account(&self) -> Account {
        let mut used = self.0.lock();
        let free = self.0.limits.descriptors - used.guaranteed - used.common;
        let guaranteed = self.0.share.min(free);
        used.guaranteed += guaranteed;
        Account::of(Arc::new(Share {
            shared: Arc::clone(&self.0),
            guaranteed,
            requests: AtomicUsize::new(0),
            used: Mutex::default(),
        }))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Used> {
        // The numbers are whole at every step.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one peer uses. Clones are the same account.
#[derive(Clone, Debug)]
pub struct Account(Arc<AccountState>);

#[derive(Debug)]
struct AccountState {
    share: Arc<Share>,
    /// Permits for nothing. Nearly all of them are for descriptors that wait to be closed.
    uncounted: AtomicUsize,
    /// Jobs that wait because the peer blocks as many threads of the reaper as it may.
    deferred: AtomicUsize,
}

/// The share of an account and its parts.
#[derive(Debug)]
struct Share {
    shared: Arc<Shared>,
    guaranteed: u64,
    /// Requests under way, see [`Account::take_request`].
    requests: AtomicUsize,
    /// Locked before the budget's.
    used: Mutex<Own>,
}

#[derive(Debug, Default)]
struct Own {
    descriptors: u64,
    mapped: u64,
}

/// What a permit is for, and how much of it. In one word, since every host socket has a permit.
#[derive(Copy, Clone, Debug)]
struct Amount(u64);

impl Amount {
    /// Set: bytes of memory. Clear: descriptors.
    const MAPPED: u64 = 1 << 63;
}

impl Account {
    fn of(share: Arc<Share>) -> Account {
        Account(Arc::new(AccountState {
            share,
            uncounted: AtomicUsize::new(0),
            deferred: AtomicUsize::new(0),
        }))
    }

    /// Another account that uses the same share, for another peer: it is [clogged](Self::is_clogged)
    /// by its own descriptors only, and blocks threads of the reaper of its own.
    pub fn part(&self) -> Account {
        Account::of(Arc::clone(&self.0.share))
    }

    /// Takes descriptors, all or none.
    ///
    /// # Errors
    /// [`Exceeded::Descriptors`].
    pub fn take_descriptors(&self, count: u64) -> Result<Permit, Exceeded> {
        let Share {
            shared, guaranteed, ..
        } = &*self.0.share;
        let mut own = self.0.share.lock();
        let before = own.descriptors.saturating_sub(*guaranteed);
        let after = (own.descriptors + count).saturating_sub(*guaranteed);
        if after > before {
            let mut used = shared.lock();
            let common = shared.limits.descriptors - used.guaranteed;
            if after - before > common.saturating_sub(used.common) {
                used.refused += count;
                return Err(Exceeded::Descriptors {
                    used: own.descriptors,
                    guaranteed: *guaranteed,
                    common,
                });
            }
            used.common += after - before;
        }
        own.descriptors += count;
        shared.numbers.add(count);
        Ok(self.permit(Amount(count)))
    }

    /// Counts a request to something that all peers use, until the result is dropped. `None`: `most` of the
    /// account and its parts are under way.
    pub fn take_request(&self, most: usize) -> Option<RequestPermit> {
        // Relaxed: the number guards no other data.
        let more = |requests| (requests < most).then_some(requests + 1);
        let requests = &self.0.share.requests;
        let counted = requests.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted
            .is_ok()
            .then(|| RequestPermit(Arc::clone(&self.0.share)))
    }

    /// Accounts that are expected.
    pub fn expected(&self) -> usize {
        self.0.share.shared.accounts
    }

    /// Counts a descriptor that is refused for another reason.
    pub fn count_refused(&self) {
        self.0.share.shared.lock().refused += 1;
    }

    /// Takes address space for memory of the peer.
    ///
    /// # Errors
    /// [`Exceeded::Mapped`] or [`Exceeded::MappedByAll`].
    pub fn take_mapped(&self, bytes: u64) -> Result<Permit, Exceeded> {
        let shared = &self.0.share.shared;
        let limits = shared.limits;
        let mut own = self.0.share.lock();
        // A region's length is at most isize::MAX, and so the highest bit is free.
        let most = limits.mapped_each.min(Amount::MAPPED - 1);
        if bytes > most.saturating_sub(own.mapped) {
            return Err(Exceeded::Mapped {
                asked: bytes,
                used: own.mapped,
                limit: limits.mapped_each,
            });
        }
        let mut used = shared.lock();
        if bytes > limits.mapped.saturating_sub(used.mapped) {
            return Err(Exceeded::MappedByAll {
                asked: bytes,
                used: used.mapped,
                limit: limits.mapped,
            });
        }
        used.mapped += bytes;
        own.mapped += bytes;
        Ok(self.permit(Amount(bytes | Amount::MAPPED)))
    }

    /// Whether so many descriptors of the peer wait to be closed that no more may be received from
    /// it: their close may wait, and each has a number of this process. Those that
    /// count against the share, such as our own sockets, are bounded by it and do not matter here
    /// until they are stuck. Also true if the numbers of all peers do not suffice for a message; a
    /// peer with uncounted descriptors has to leave numbers for another message.
    pub fn is_clogged(&self) -> bool {
        let uncounted = self.0.uncounted.load(Ordering::Relaxed);
        let messages = if uncounted < MAX_DEFERRED { 1 } else { 2 };
        self.0.deferred.load(Ordering::Relaxed) >= MAX_DEFERRED
            || uncounted >= MAX_UNCOUNTED
            || !self.0.share.shared.numbers.has(messages * MAX_FDS as u64)
    }

    /// Reserves numbers for the descriptors of one message, until the result is dropped. `None`: so
    /// many are not free, and the message must not be received.
    pub fn reserve_message(&self) -> Option<ReservedNumbers> {
        let numbers = &self.0.share.shared.numbers;
        let count = MAX_FDS as u64;
        let before = numbers.used.fetch_add(count, Ordering::Relaxed);
        // Dropping it takes the number back.
        let reserved = ReservedNumbers(Arc::clone(numbers));
        (numbers.limit.saturating_sub(before) >= count).then_some(reserved)
    }

    /// So many jobs of the peer wait for stuck ones of its own.
    pub(crate) fn set_deferred(&self, jobs: usize) {
        self.0.deferred.store(jobs, Ordering::Relaxed);
    }

    /// So many jobs of the peer wait. Those that had to wait for stuck ones count until they are
    /// run.
    pub(crate) fn limit_deferred(&self, jobs: usize) {
        self.0.deferred.fetch_min(jobs, Ordering::Relaxed);
    }

    /// A permit for a number only, which does not count against the share. It names the account, so
    /// that what it is given to counts as this peer's.
    pub fn take_nothing(&self) -> Permit {
        self.permit(Amount(0))
    }

    /// A number that no other account has while this one is open.
    pub(crate) fn number(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Descriptors of the share in use.
    pub fn descriptors(&self) -> u64 {
        self.0.share.lock().descriptors
    }

    fn permit(&self, amount: Amount) -> Permit {
        if amount.0 == 0 {
            self.0.uncounted.fetch_add(1, Ordering::Relaxed);
            self.0.share.shared.numbers.add(1);
        }
        Permit {
            account: self.clone(),
            amount,
        }
    }
}

impl Share {
    fn lock(&self) -> MutexGuard<'_, Own> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // Permits hold their accounts, and accounts the share: none is left.
        self.shared.lock().guaranteed -= self.guaranteed;
    }
}

/// One use of an account; dropping it ends the use.
#[derive(Debug)]
pub struct Permit {
    account: Account,
    amount: Amount,
}

impl Permit {
    /// The account that is used.
    pub fn account(&self) -> &Account {
        &self.account
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let share = &*self.account.0.share;
        if self.amount.0 == 0 {
            self.account.0.uncounted.fetch_sub(1, Ordering::Relaxed);
            share.shared.numbers.sub(1);
            return;
        }
        let mut own = share.lock();
        let amount = self.amount.0 & !Amount::MAPPED;
        if self.amount.0 & Amount::MAPPED != 0 {
            own.mapped -= amount;
            share.shared.lock().mapped -= amount;
            return;
        }
        share.shared.numbers.sub(amount);
        let before = own.descriptors.saturating_sub(share.guaranteed);
        own.descriptors -= amount;
        let after = own.descriptors.saturating_sub(share.guaranteed);
        if before > after {
            share.shared.lock().common -= before - after;
        }
    }
}

/// A request under way, see [`Account::take_request`].
#[derive(Debug)]
pub struct RequestPermit(Arc<Share>);

impl Drop for RequestPermit {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Numbers for the descriptors of a message, see [`Account::reserve_message`].
#[derive(Debug)]
pub struct ReservedNumbers(Arc<Numbers>);

impl Drop for ReservedNumbers {
    fn drop(&mut self) {
        self.0.sub(MAX_FDS as u64);
    }
}

#[cfg(test)]
#[path = "account_tests.rs"]
mod tests;
