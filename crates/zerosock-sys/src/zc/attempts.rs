//! Which request of a place a completion is of.
//!
//! A place may see many requests: one that was cancelled, or cut short, is followed by another, and
//! so is its buffer by the next one. Each is an *attempt* with a number of its own, which its
//! completions carry beside the place. For a result says by F_MORE that a notification is to come,
//! and there can be one although it was not said: a zero-copy request that the kernel never began,
//! because one in front of it in its chain failed, ends with ECANCELED, or with what its preparation
//! failed with, without F_MORE (`io_req_tw_fail_links` clears the flags); its notification, which is
//! made before (`io_send_zc_prep`), is posted all the same when the request is freed. That is later,
//! much later if the thread that submitted it has ended, and the place may be about its next attempt
//! by then. So it is in Linux 6.1 to 6.18.
//!
//! A request that was begun, however it ends, says F_MORE (`io_send_zc`, `io_sendmsg_zc`, and
//! `io_sendrecv_fail` for those that fail outside of them), and only one that was begun can have
//! given its buffer to the network. So nobody reads on behalf of an attempt without F_MORE once its
//! result is there, and what is posted for it later means nothing. What must hold: a place is idle
//! only when every attempt has had its result, and each whose result said F_MORE its own
//! notification.

use io_uring::cqueue;

use super::places::Places;
use super::{Event, Key};
use std::io;

/// `IORING_NOTIF_USAGE_ZC_COPIED`, in a notification's result.
pub(super) const COPIED: u32 = 1 << 31;

/// The attempts of one place.
#[derive(Default)]
struct OfPlace {
    /// The number of the last one.
    last: u32,
    /// One whose notification is to come: there is seldom another.
    awaited: Option<Awaited>,
    others: Vec<Awaited>,
}

impl OfPlace {
    fn awaits(&mut self, one: Awaited) {
        if let Some(older) = self.awaited.replace(one) {
            self.others.push(older);
        }
    }

    /// Whether it took bytes; none if nobody waits for this one.
    fn noted(&mut self, number: u32) -> Option<bool> {
        if let Some(one) = self.awaited.take_if(|one| one.number == number) {
            return Some(one.took);
        }
        let index = self.others.iter().position(|one| one.number == number)?;
        Some(self.others.swap_remove(index).took)
    }
}

struct Awaited {
    number: u32,
    /// It took bytes: its notification says what became of them, and frees memory.
    took: bool,
}

/// The attempts of all places.
pub(super) struct Attempts {
    places: Box<[OfPlace]>,
}

/// A completion, as the kernel posts it.
#[derive(Copy, Clone)]
pub(super) struct Posted {
    pub(super) user_data: u64,
    pub(super) result: i32,
    pub(super) flags: u32,
}

impl Attempts {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            places: (0..capacity).map(|_| OfPlace::default()).collect(),
        }
    }

    /// What the next request of a place is to carry as its user data. No place is that of u32::MAX.
    pub(super) fn next(&mut self, key: Key) -> u64 {
        let number = self.places.get_mut(key.index()).map_or(0, |place| {
            place.last = place.last.wrapping_add(1);
            place.last
        });
        u64::from(number) << 32 | u64::from(key.0)
    }

    /// The place that such user data is of.
    pub(super) fn key(user_data: u64) -> Key {
        Key(user_data as u32)
    }

    /// What a completion means; nothing, if it is a notification that nobody waits for.
    pub(super) fn event<B>(&mut self, places: &mut Places<B>, posted: Posted) -> Option<Event> {
        let key = Self::key(posted.user_data);
        let number = (posted.user_data >> 32) as u32;
        let place = self.places.get_mut(key.index())?;
        if cqueue::notif(posted.flags) {
            let took = place.noted(number)?;
            places.noted(key, took);
            let copied = took.then_some(posted.result as u32 & COPIED != 0);
            return Some(Event::Noted { key, copied });
        }
        let more = cqueue::more(posted.flags);
        let took = posted.result > 0;
        if more {
            place.awaits(Awaited { number, took });
            places.owes(key, took);
        }
        places.ended(key);
        let result = match usize::try_from(posted.result) {
            Ok(sent) => Ok(sent),
            Err(_) => Err(io::Error::from_raw_os_error(-posted.result)),
        };
        Some(Event::Done(key, result))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// IORING_CQE_F_MORE and IORING_CQE_F_NOTIF.
    const MORE: u32 = 1 << 1;
    const NOTIF: u32 = 1 << 3;
    const CANCELLED: i32 = -libc::ECANCELED;

    struct Kernel {
        attempts: Attempts,
        places: Places<Vec<u8>>,
    }

    impl Kernel {
        fn new() -> Self {
            Self {
                attempts: Attempts::new(4),
                places: Places::new(4),
            }
        }

        fn put(&mut self) -> Key {
            self.places.put(vec![1], None).expect("a place")
        }

        fn begin(&mut self, key: Key) -> u64 {
            self.places.begun(key);
            self.attempts.next(key)
        }

        fn posts(&mut self, user_data: u64, result: i32, flags: u32) -> Option<Event> {
            let posted = Posted {
                user_data,
                result,
                flags,
            };
            self.attempts.event(&mut self.places, posted)
        }
    }

    #[test]
    fn a_late_notification_of_what_never_began_frees_nothing() {
        let mut kernel = Kernel::new();
        let key = kernel.put();
        // Behind one that failed in its chain: cancelled, and asked again.
        let first = kernel.begin(key);
        assert!(matches!(
            kernel.posts(first, CANCELLED, 0),
            Some(Event::Done(..))
        ));
        assert!(kernel.places.idle(key));
        let second = kernel.begin(key);
        kernel.posts(second, 1, MORE);
        assert!(kernel.posts(first, COPIED as i32, NOTIF).is_none());
        assert!(!kernel.places.idle(key), "the kernel reads the buffer");
        assert_eq!(kernel.places.take(key), None);
        assert!(kernel.posts(second, 0, NOTIF).is_some());
        assert_eq!(kernel.places.take(key), Some(vec![1]));
        assert_eq!((kernel.places.owed, kernel.places.reading), (0, 0));
    }

    #[test]
    fn a_late_notification_is_not_the_next_buffers() {
        let mut kernel = Kernel::new();
        let key = kernel.put();
        let first = kernel.begin(key);
        kernel.posts(first, -libc::ENOMEM, 0);
        assert!(kernel.places.take(key).is_some());
        assert_eq!(kernel.put(), key);
        let second = kernel.begin(key);
        // Before its result, and after.
        assert!(kernel.posts(first, COPIED as i32, NOTIF).is_none());
        kernel.posts(second, 1, MORE);
        assert!(kernel.posts(first, COPIED as i32, NOTIF).is_none());
        assert!(!kernel.places.idle(key));
    }

    #[test]
    fn attempts_are_noted_in_any_order_and_only_what_took_bytes_tells_of_copies() {
        let mut kernel = Kernel::new();
        let key = kernel.put();
        let short = kernel.begin(key);
        kernel.posts(short, 1, MORE);
        let failed = kernel.begin(key);
        kernel.posts(failed, CANCELLED, MORE);
        let rest = kernel.begin(key);
        kernel.posts(rest, 1, MORE);
        assert_eq!((kernel.places.owed, kernel.places.reading), (1, 2));
        let mut noted = |user_data| match kernel.posts(user_data, COPIED as i32, NOTIF) {
            Some(Event::Noted { copied, .. }) => copied,
            other => panic!("{other:?}"),
        };
        assert_eq!(noted(rest), Some(true));
        assert_eq!(noted(failed), None);
        assert_eq!(noted(short), Some(true));
        assert!(kernel.places.idle(key));
        assert_eq!((kernel.places.owed, kernel.places.reading), (0, 0));
        // Twice is once too often.
        assert!(kernel.posts(short, 0, NOTIF).is_none());
    }

    #[test]
    fn what_is_no_place_is_passed_over() {
        let mut kernel = Kernel::new();
        assert!(kernel.posts(u64::from(u32::MAX), 0, NOTIF).is_none());
        assert!(kernel.posts(77, 0, 0).is_none());
    }
}
