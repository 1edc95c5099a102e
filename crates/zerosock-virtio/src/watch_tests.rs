//! Unit tests of `watch`.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::*;

fn is_readable(watch: &Watch) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(watch, PollFlags::IN)], Some(&now)).unwrap() > 0
}

/// Each queue pair has two calls; all of them, the waker and the device may be raised at once.
#[test]
fn one_call_clears_what_all_queue_pairs_have_raised() {
    for pairs in [1, 2, 3, 8, 16] {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let calls: Vec<OwnedFd> = (0..2 * pairs + 1)
            .map(|_| eventfd(0, flags).unwrap())
            .collect();
        let mut watch = Watch::new(&calls).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        watch.device(ours.as_fd()).unwrap();
        assert!(!watch.clear().unwrap() && !is_readable(&watch));
        let raise = || {
            for call in &calls {
                rustix::io::write(call, &1u64.to_ne_bytes()).unwrap();
            }
            watch.wake();
        };
        raise();
        assert!(!watch.clear().unwrap());
        assert!(!is_readable(&watch), "{pairs} queue pairs");
        raise();
        let soon = Instant::now() + Duration::from_secs(60);
        assert!(!watch.sleep(Some(soon)).unwrap());
        assert!(!is_readable(&watch), "{pairs} queue pairs");
        // The hang-up comes last.
        raise();
        drop(theirs);
        assert!(watch.clear().unwrap(), "{pairs} queue pairs");
        assert!(!is_readable(&watch));
    }
}
