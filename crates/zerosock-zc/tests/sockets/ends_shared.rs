//! Closing a sender that threads share or a task owns; and an event loop beside threads.

use std::mem::MaybeUninit;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use zerosock_zc::tokio::AsyncSender;
use zerosock_zc::{CloseOutcome, Copying, Outgoing, Refusal, Sender};

use crate::ends::{ALL, SENDS, pair, read_to_reset, with_much};
use crate::network::BACKENDS;
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);
const MOMENT: Duration = Duration::from_millis(50);

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
}

#[test]
fn a_shared_stream_is_closed_for_every_handle() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        let sender = with_much(socket, backend, Copying::Never);
        let sender = sender.into_shared().expect("descriptors");
        let other = sender.clone();
        let reader = thread::spawn(move || check(far));
        let closed = sender.close(Some(PATIENCE));
        assert!(closed.is_whole() && !closed.reset, "{backend:?}");
        assert_eq!((closed.returned.len(), closed.held), (SENDS, 0));
        // The peer has met the end, although there are handles yet.
        assert_eq!(reader.join().expect("the contents"), ALL, "{backend:?}");
        let refused = other
            .send(Outgoing::new(vec![1]))
            .expect_err("it is closed");
        assert!(matches!(refused.why, Refusal::Closed), "{backend:?}");
        assert!(other.is_quiet() && other.room() == SENDS);
        drop(sender);
    }
}

#[test]
fn closing_a_shared_stream_wakes_every_waiting_thread() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        let sender = with_much(socket, backend, Copying::Never);
        let sender = sender.into_shared().expect("descriptors");
        assert_eq!(
            sender.socket().try_clone_to_owned().map(drop).ok(),
            Some(())
        );
        thread::scope(|scope| {
            let waiting: Vec<_> = (0..2)
                .map(|_| {
                    let sender = sender.clone();
                    scope.spawn(move || {
                        loop {
                            // At some point there is no place.
                            if let Err(refused) = sender.send(Outgoing::new(vec![1; 1 << 17])) {
                                return refused.why;
                            }
                        }
                    })
                })
                .collect();
            let finishing = scope.spawn(|| sender.clone().finish(None));
            let closed = sender.close(Some(MOMENT));
            assert!(
                matches!(closed.outcome, CloseOutcome::TimedOut) && closed.reset,
                "{backend:?}"
            );
            for waiting in waiting {
                let why = waiting.join().expect("a thread");
                assert!(matches!(why, Refusal::Closed), "{backend:?}: {why}");
            }
            assert!(finishing.join().expect("a thread").expect("an answer"));
        });
        // No byte follows the gap later.
        assert!(
            matches!(sender.close(None).outcome, CloseOutcome::Broken(_)),
            "{backend:?}"
        );
        assert!(read_to_reset(far) < ALL, "{backend:?}");
    }
}

#[test]
fn a_task_closes_its_stream_in_time_or_resets_it() {
    for backend in BACKENDS {
        for (time, reads) in [(None, true), (Some(PATIENCE), true), (Some(MOMENT), false)] {
            let (socket, far) = pair();
            let sender = with_much(socket, backend, Copying::Never);
            let reader = reads.then(|| far.try_clone().expect("a descriptor"));
            let reader = reader.map(|far| thread::spawn(move || check(far)));
            let closed = runtime().block_on(async {
                let sender = AsyncSender::try_from(sender).expect("descriptors");
                sender.close(time).await
            });
            assert_eq!((closed.is_whole(), closed.reset), (reads, !reads));
            assert_eq!(closed.returned.len() + closed.held, SENDS, "{backend:?}");
            match reader {
                Some(reader) => assert_eq!(reader.join().expect("the contents"), ALL),
                None => assert!(read_to_reset(far) < ALL, "{backend:?}"),
            }
        }
    }
}

#[test]
fn a_close_that_is_not_awaited_to_the_end_resets() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        let sender = with_much(socket, backend, Copying::Never);
        runtime().block_on(async {
            let sender = AsyncSender::try_from(sender).expect("descriptors");
            let mut closing = Box::pin(sender.close(None));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(closing.as_mut().poll(&mut context).is_pending());
        });
        assert!(read_to_reset(far) < ALL, "{backend:?}");
    }
}

/// A call of another thread wakes the event loop without an event of the kernel.
#[test]
fn an_event_loop_is_woken_by_calls_of_a_thread() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        let builder = Sender::builder().backend(backend);
        let sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        let sender = sender.into_shared().expect("descriptors");
        let sent = sender.send(Outgoing::new(vec![1; 100]).slot(0));
        sent.map_err(|refused| refused.why).expect("a place");
        while !sender.is_quiet() {
            sender.wait(Some(PATIENCE)).expect("the kernel answers");
        }
        let events = sender.events().expect("descriptors");
        let ready = |time| {
            let time = Timespec::try_from(time).expect("it fits");
            let mut wanted = [PollFd::from_borrowed_fd(events, PollFlags::IN)];
            poll(&mut wanted, Some(&time)).expect("a descriptor") > 0
        };
        while ready(Duration::ZERO) {
            sender.poll().expect("the kernel answers");
        }
        assert!(sender.notification().is_none());
        thread::scope(|scope| {
            let other = sender.clone();
            scope.spawn(move || other.flush(0..1).expect("there is one"));
            assert!(ready(PATIENCE), "{backend:?}");
        });
        assert!(sender.notification().is_some(), "{backend:?}");
        drop(far);
    }
}

/// An event that another thread handles wakes the event loop.
#[test]
fn an_event_loop_and_threads_share_a_sender() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        let sender = with_much(socket, backend, Copying::Never);
        let sender = sender.into_shared().expect("descriptors");
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor");
        let events = sender.events().expect("descriptors");
        let data = epoll::EventData::new_u64(0);
        let wanted = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, events, data, wanted).expect("an epoll");
        let reader = thread::spawn(move || check(far));
        let begun = Instant::now();
        thread::scope(|scope| {
            let finishing = scope.spawn(|| sender.clone().finish(None));
            let mut back = 0;
            let patience = Timespec::try_from(PATIENCE).expect("it fits");
            while back < SENDS {
                let mut ready = [MaybeUninit::uninit(); 4];
                match epoll::wait(&epoll, &mut ready, Some(&patience)) {
                    Ok((ready, _)) => assert!(!ready.is_empty(), "{backend:?}: {back}"),
                    Err(error) => assert_eq!(error, rustix::io::Errno::INTR),
                }
                sender.poll().expect("the kernel answers");
                back += std::iter::from_fn(|| sender.returned()).count();
            }
            assert!(finishing.join().expect("a thread").expect("an answer"));
        });
        assert!(begun.elapsed() < PATIENCE);
        assert!(sender.close(None).is_whole(), "{backend:?}");
        assert_eq!(reader.join().expect("the contents"), ALL, "{backend:?}");
    }
}
