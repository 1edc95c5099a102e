//! How many attempts are made at once, and when, with a clock of the test.

use std::cell::RefCell;

use tokio::runtime::{Builder, Runtime};
use tokio::time::sleep;

use super::*;

thread_local! {
    /// The addresses of the attempts that have begun and not ended, and how many there were, at the most.
    static OPEN: RefCell<(Vec<u8>, usize)> = const { RefCell::new((Vec::new(), 0)) };
}

/// An attempt that has no answer until it is given up.
struct Silent(u8);

impl Silent {
    fn new(last: u8) -> Silent {
        OPEN.with_borrow_mut(|(open, most)| {
            open.push(last);
            *most = open.len().max(*most);
        });
        Silent(last)
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        OPEN.with_borrow_mut(|(open, _)| {
            let at = open.iter().position(|last| *last == self.0).unwrap();
            open.remove(at);
        });
    }
}

fn silent(address: SocketAddr) -> Attempt {
    let IpAddr::V4(ip) = address.ip() else {
        panic!("{address}");
    };
    let open = Silent::new(ip.octets()[3]);
    Box::pin(async move {
        let _open = open;
        pending().await
    })
}

fn open() -> Vec<u8> {
    OPEN.with_borrow(|(open, _)| open.clone())
}

fn most() -> usize {
    OPEN.with_borrow(|(_, most)| *most)
}

/// The clock of this runtime goes on when nothing else is to be done.
fn runtime() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().unwrap()
}

/// A request for a host with the addresses 192.0.2.1 to 192.0.2.`count`, which ends after 10 s.
async fn request(count: u8, at_once: usize, extra: Extra) {
    let all: Vec<IpAddr> = (1..=count).map(|n| [192, 0, 2, n].into()).collect();
    let plan = DialPlan {
        port: 80,
        policy: &AddressPolicy::for_guests(Vec::new(), Vec::new()),
        deadline: Instant::now() + Duration::from_secs(10),
        order: Order::default(),
        at_once,
        extra: &extra,
    };
    let result = dial(Addresses::named(Found::known(&all)), plan, silent).await;
    let error = result.err().unwrap();
    assert!(matches!(error, ConnectError::TimedOut(_)), "{error}");
}

/// The attempts under way at these times of a request for eight addresses.
fn attempts_of_one(at_once: usize, at: &[u64]) -> Vec<Vec<u8>> {
    runtime().block_on(async {
        let extra = Arc::new(Semaphore::new(MAX_EXTRA));
        let began = Instant::now();
        let task = tokio::spawn(request(8, at_once, extra));
        let mut seen = Vec::new();
        for millis in at {
            sleep_until(began + Duration::from_millis(*millis)).await;
            seen.push(open());
        }
        task.await.unwrap();
        assert!(open().is_empty());
        seen
    })
}

#[test]
fn six_addresses_are_tried_at_once_and_the_oldest_makes_room() {
    let seen = attempts_of_one(ATTEMPTS_AT_ONCE, &[249, 251, 1249, 1251, 1999, 2001, 2251]);
    let wanted: [&[u8]; 7] = [
        &[1],
        &[1, 2],
        &[1, 2, 3, 4, 5],
        &[1, 2, 3, 4, 5, 6],
        &[1, 2, 3, 4, 5, 6],
        &[2, 3, 4, 5, 6, 7],
        &[3, 4, 5, 6, 7, 8],
    ];
    assert_eq!(seen, wanted);
    assert_eq!(most(), ATTEMPTS_AT_ONCE);
}

#[test]
fn a_request_for_one_attempt_at_once_makes_one() {
    let seen = attempts_of_one(1, &[1, 1999, 2001, 4001]);
    assert_eq!(seen, [[1], [1], [2], [3]]);
    assert_eq!(most(), 1);
}

/// 300 requests would have 1800 attempts.
#[test]
fn all_requests_together_have_a_bound_and_each_has_one_attempt() {
    const REQUESTS: usize = 300;
    runtime().block_on(async {
        let extra = Arc::new(Semaphore::new(MAX_EXTRA));
        let requests = (0..REQUESTS).map(|_| request(8, ATTEMPTS_AT_ONCE, Arc::clone(&extra)));
        let tasks: Vec<_> = requests.map(tokio::spawn).collect();
        sleep(Duration::from_millis(1500)).await;
        assert_eq!(open().len(), REQUESTS + MAX_EXTRA);
        // Those without a second attempt go on to the next address by giving up the first.
        sleep(Duration::from_millis(1000)).await;
        assert_eq!(open().len(), REQUESTS + MAX_EXTRA);
        for task in tasks {
            task.await.unwrap();
        }
        assert!(open().is_empty());
        assert_eq!(most(), REQUESTS + MAX_EXTRA);
        assert_eq!(extra.available_permits(), MAX_EXTRA);
    });
}
