//! Results and notifications of requests, and the events of their places.

use super::super::{Buf, SendMode};
use super::*;

/// IORING_CQE_F_MORE and IORING_CQE_F_NOTIF.
const MORE: u32 = 1 << 1;
const NOTIF: u32 = 1 << 3;
const CANCELLED: i32 = -libc::ECANCELED;

const SUBMISSION: Submission = Submission {
    mode: SendMode::ZeroCopy,
    from: 0,
    whole: true,
    linked: false,
    more: false,
    when_writable: false,
};
const RULES: GatherRules = GatherRules {
    many: true,
    by_arena: true,
    longest: 10_000,
};

struct Kernel {
    requests: Requests,
    places: Places<Buf>,
}

impl Kernel {
    fn new() -> Self {
        Self {
            requests: Requests::default(),
            places: Places::new(8),
        }
    }

    fn put(&mut self, len: usize) -> Key {
        let buffer = Buf::from(vec![1; len]);
        self.places.put(buffer, None).expect("a place")
    }

    fn begin(&mut self, keys: &[Key]) -> u64 {
        self.begin_from(keys, 0)
    }

    fn begin_from(&mut self, keys: &[Key], from: usize) -> u64 {
        let submission = Submission { from, ..SUBMISSION };
        let id = self.requests.gather(&self.places, keys, &submission, RULES);
        let id = id.expect("a request");
        self.requests.begun(&mut self.places, id);
        self.requests.user_data(id)
    }

    fn posts(&mut self, user_data: u64, result: i32, flags: u32) -> Vec<Reported> {
        let posted = CompletionEntry {
            user_data,
            result,
            flags,
        };
        assert_eq!(self.requests.posted(&mut self.places, posted), None);
        let events = self.requests.events.drain(..);
        events.map(Reported::from).collect()
    }

    fn is_at_rest(&self) -> bool {
        (self.places.busy, self.places.reading) == (0, 0)
            && self.requests.vacant.len() == self.requests.all.len()
    }
}

/// An event, to be compared.
#[derive(Debug, Eq, PartialEq)]
enum Reported {
    Done(Key, Result<usize, i32>),
    Noted(Key, Option<bool>),
}

impl From<Event> for Reported {
    fn from(event: Event) -> Self {
        match event {
            Event::Done(key, result) => {
                let code = |error: io::Error| -error.raw_os_error().expect("the kernel's");
                Self::Done(key, result.map_err(code))
            }
            Event::Notified { key, copied, .. } => Self::Noted(key, copied),
        }
    }
}

use Reported::{Done, Noted};

#[test]
fn a_late_notification_of_a_request_that_never_began_is_ignored() {
    let mut kernel = Kernel::new();
    let key = kernel.put(1);
    // After a failure in its chain: cancelled, and retried.
    let first = kernel.begin(&[key]);
    let told = kernel.posts(first, CANCELLED, 0);
    assert_eq!(told, [Done(key, Err(CANCELLED))]);
    assert!(kernel.places.idle(key));
    let second = kernel.begin(&[key]);
    kernel.posts(second, 1, MORE);
    assert_eq!(kernel.posts(first, COPIED as i32, NOTIF), []);
    assert!(!kernel.places.idle(key), "the kernel reads the buffer");
    assert!(kernel.places.take(key).is_none());
    assert_eq!(kernel.posts(second, 0, NOTIF), [Noted(key, Some(false))]);
    assert!(kernel.places.take(key).is_some());
    assert!(kernel.is_at_rest());
}

#[test]
fn a_late_notification_does_not_free_the_next_buffer() {
    let mut kernel = Kernel::new();
    let key = kernel.put(1);
    let first = kernel.begin(&[key]);
    kernel.posts(first, -libc::ENOMEM, 0);
    assert!(kernel.places.take(key).is_some());
    assert_eq!(kernel.put(1), key);
    let second = kernel.begin(&[key]);
    // Before its result, and after.
    assert_eq!(kernel.posts(first, COPIED as i32, NOTIF), []);
    kernel.posts(second, 1, MORE);
    assert_eq!(kernel.posts(first, COPIED as i32, NOTIF), []);
    assert!(!kernel.places.idle(key));
}

#[test]
fn notifications_arrive_in_any_order_and_report_copies_only_of_taken_bytes() {
    let mut kernel = Kernel::new();
    let key = kernel.put(3);
    let short = kernel.begin(&[key]);
    kernel.posts(short, 1, MORE);
    let failed = kernel.begin_from(&[key], 1);
    kernel.posts(failed, CANCELLED, MORE);
    let rest = kernel.begin_from(&[key], 1);
    kernel.posts(rest, 2, MORE);
    assert_eq!((kernel.places.busy, kernel.places.reading), (1, 2));
    let mut notified = |user_data| kernel.posts(user_data, COPIED as i32, NOTIF);
    assert_eq!(notified(rest), [Noted(key, Some(true))]);
    assert_eq!(notified(failed), [Noted(key, None)]);
    assert_eq!(notified(short), [Noted(key, Some(true))]);
    // A second notification is ignored.
    assert_eq!(notified(short), []);
    assert!(kernel.places.idle(key));
    assert!(kernel.is_at_rest());
}

#[test]
fn unknown_user_data_is_ignored() {
    let mut kernel = Kernel::new();
    assert_eq!(kernel.posts(u64::from(u32::MAX), 0, NOTIF), []);
    assert_eq!(kernel.posts(77, 0, 0), []);
}

#[test]
fn a_result_is_split_over_the_places_of_a_request() {
    let mut kernel = Kernel::new();
    let keys = [1000, 0, 2000, 3000].map(|len| kernel.put(len));
    let [first, empty, second, third] = keys;
    // If the first place fails, the others were not begun.
    let failed = kernel.begin(&keys);
    let told = kernel.posts(failed, -libc::ENOMEM, MORE);
    let behind = [empty, second, third].map(|key| Done(key, Err(CANCELLED)));
    assert_eq!(told[0], Done(first, Err(-libc::ENOMEM)));
    assert_eq!(told[1..], behind);
    assert!(keys.iter().all(|&key| !kernel.places.idle(key)));
    let told = kernel.posts(failed, 0, NOTIF);
    assert_eq!(told, keys.map(|key| Noted(key, None)));
    assert!(kernel.is_at_rest());
    // A request that ends within the second place, and one that continues there.
    let short = kernel.begin(&keys);
    let told = kernel.posts(short, 1500, MORE);
    let expected = [
        Done(first, Ok(1000)),
        Done(empty, Ok(0)),
        Done(second, Ok(500)),
        Done(third, Err(CANCELLED)),
    ];
    assert_eq!(told, expected);
    let rest = kernel.begin_from(&[second, third], 500);
    let told = kernel.posts(rest, 4500, MORE);
    assert_eq!(told, [Done(second, Ok(1500)), Done(third, Ok(3000))]);
    let told = kernel.posts(rest, 0, NOTIF);
    assert_eq!(told, [second, third].map(|key| Noted(key, Some(false))));
    // The second place belongs to both requests; the first request took nothing of the third place.
    assert!(kernel.places.take(third).is_some());
    assert!(kernel.places.take(second).is_none());
    let told = kernel.posts(short, COPIED as i32, NOTIF);
    assert_eq!(told, [first, second].map(|key| Noted(key, Some(true))));
    assert!(
        [first, empty, second]
            .map(|key| kernel.places.take(key))
            .iter()
            .all(Option::is_some)
    );
    assert!(kernel.is_at_rest());
}

#[test]
fn a_result_that_ends_with_a_place_begins_no_later_place() {
    let mut kernel = Kernel::new();
    let keys = [1000, 2000, 0].map(|len| kernel.put(len));
    let short = kernel.begin(&keys);
    let told = kernel.posts(short, 1000, 0);
    let expected = [
        Done(keys[0], Ok(1000)),
        Done(keys[1], Err(CANCELLED)),
        Done(keys[2], Err(CANCELLED)),
    ];
    assert_eq!(told, expected);
    assert!(kernel.is_at_rest());
}

#[test]
fn a_request_of_several_places_respects_the_longest_request() {
    let mut kernel = Kernel::new();
    let mut lengths = |lens: &[usize], from, rules| {
        let keys: Vec<_> = lens.iter().map(|&len| kernel.put(len)).collect();
        let submission = Submission { from, ..SUBMISSION };
        let id = kernel
            .requests
            .gather(&kernel.places, &keys, &submission, rules);
        let request = kernel.requests.get(id.expect("a request"));
        let pieces = request.pieces().iter().map(|piece| piece.iov_len);
        let found = (pieces.collect::<Vec<_>>(), request.places(), request.is_cut);
        for key in keys {
            kernel.places.take(key);
        }
        found
    };
    let (most, alone) = (
        RULES,
        GatherRules {
            many: false,
            ..RULES
        },
    );
    assert_eq!(
        lengths(&[3000, 0, 7000, 1], 0, most),
        (vec![3000, 7000], 3, false)
    );
    assert_eq!(lengths(&[3000, 7001, 1], 0, most), (vec![3000], 1, false));
    assert_eq!(
        lengths(&[3000, 7001, 1], 1, most),
        (vec![2999, 7001], 2, false)
    );
    assert_eq!(lengths(&[3000, 100], 0, alone), (vec![3000], 1, false));
    assert_eq!(lengths(&[10_001, 0], 0, most), (vec![10_000], 1, true));
    assert_eq!(lengths(&[10_001, 0], 1, most), (vec![10_000], 2, false));
    assert_eq!(lengths(&[10_001, 1], 10_001, most), (vec![1], 2, false));
    assert_eq!(lengths(&[0], 0, most), (vec![], 1, false));
}

#[test]
fn a_buffer_of_several_pieces_continues_where_it_was_cut() {
    let pieces = [3000, 0, 5000, 100].map(|len| Buf::from(vec![1; len]));
    let buffer = Buf::from(pieces.into_iter().collect::<Vec<_>>());
    for (from, most, expected) in [
        (0, 10_000, &[3000, 5000, 100][..]),
        (0, 3000, &[3000]),
        (0, 3001, &[3000, 1]),
        (3001, 5000, &[4999, 1]),
        (8001, 5000, &[99]),
        (8100, 5000, &[]),
    ] {
        let mut request = Request::default();
        assert!(request.add(Key(0), &buffer, from, most));
        let found: Vec<_> = request.pieces().iter().map(|piece| piece.iov_len).collect();
        assert_eq!(found, expected, "{from}, {most}");
    }
}

#[test]
fn a_request_has_no_more_pieces_than_the_kernel_takes() {
    let mut kernel = Kernel::new();
    let limit = libc::UIO_MAXIOV as usize;
    let many = |count| {
        Buf::from(
            (0..count)
                .map(|_| Buf::from(vec![1; 2]))
                .collect::<Vec<_>>(),
        )
    };
    let mut put = |count| {
        let put = kernel.places.put(many(count), None);
        put.expect("a place")
    };
    let (fits, most, too_many) = (put(1), put(limit - 1), put(limit + 1));
    let chain = |first, rest: &[Key]| -> Vec<Key> { [&[first], rest].concat() };
    let mut gather = |keys: &[Key]| {
        let gathered = kernel
            .requests
            .gather(&kernel.places, keys, &SUBMISSION, RULES);
        gathered.map(|id| kernel.requests.get(id).places())
    };
    assert_eq!(gather(&chain(fits, &[most, fits])), Ok(2));
    assert_eq!(gather(&[too_many]), Err(NotStarted::TooManyPieces));
    assert_eq!(gather(&[]), Err(NotStarted::Vacant));
}

#[test]
fn only_buffers_of_one_arena_form_a_request() {
    let mut kernel = Kernel::new();
    let pools = [(); 2].map(|()| super::super::Pool::new(2, 4096).expect("memory"));
    let mut put = |pool: usize| {
        let block = Buf::from(pools[pool].loan().expect("a block"));
        kernel.places.put(block, None).expect("a place")
    };
    let (one, same, other) = (put(0), put(0), put(1));
    let plain = kernel.put(100);
    for (keys, by_arena, expected) in [
        ([one, same, plain], true, 2),
        ([one, other, same], true, 1),
        ([plain, one, same], true, 1),
        ([plain, one, other], false, 3),
    ] {
        let rules = GatherRules { by_arena, ..RULES };
        let gathered = kernel
            .requests
            .gather(&kernel.places, &keys, &SUBMISSION, rules);
        let request = kernel.requests.get(gathered.expect("a request"));
        assert_eq!(request.places(), expected);
    }
}

#[test]
fn a_buffer_with_an_address_forms_a_request_alone() {
    let mut kernel = Kernel::new();
    let address = SocketAddress::new(&std::net::SocketAddr::from(([127, 0, 0, 1], 9)));
    let buffer = Buf::from(vec![1; 10]);
    let addressed = kernel.places.put(buffer, address).expect("a place");
    let plain = kernel.put(100);
    for keys in [[addressed, plain], [plain, addressed]] {
        let gathered = kernel
            .requests
            .gather(&kernel.places, &keys, &SUBMISSION, RULES);
        let request = kernel.requests.get(gathered.expect("a request"));
        assert_eq!(request.places(), 1);
    }
}

#[test]
fn an_abandoned_request_has_nothing_pending() {
    let mut kernel = Kernel::new();
    let keys = [10, 20].map(|len| kernel.put(len));
    let user_data = kernel.begin(&keys);
    assert_eq!(kernel.places.busy, 2);
    kernel.requests.abandoned(&mut kernel.places, user_data);
    assert!(kernel.is_at_rest());
    assert_eq!(kernel.posts(user_data, 30, MORE), []);
    assert!(kernel.is_at_rest());
}
