//! An agent's calls against a stand-in for the daemon at the other end of a pair of sockets: a whole life, answers in
//! single bytes, every answer in the place of every other one, answers without end, and ends of the stream.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zerosock_ring::{Extent, RegionConfig};

use super::*;
use crate::control::attach::AttachRequest;
use crate::control::guest::page_value::{VALUE_AT, VALUE_LEN, find_wrong_page, page_value};
use crate::control::guest::wire::{MAX_EXTENTS, RequestReader, encode_answer};

const HUGE: u64 = Extent::HUGE_PAGE;
const NONCE: Nonce = Nonce([9; 32]);
const TOKEN: Token = Token([5; 16]);
const CID: Cid = Cid::new(0x4000_0001);
const ID: AttachmentId = AttachmentId(*b"an attachment id");
const START: Start = Start {
    features: 0b1011,
    queue_size: 256,
    rings: [0, 0x4000, 0x8000],
};
const ACCEPTED: Answer = Answer::Accepted {
    cid: CID,
    token: TOKEN,
};

fn key() -> GuestKey {
    GuestKey::new(b"0123456789abcdef").unwrap()
}

/// Far away: other tests may take all processors.
fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Two mappings of `pages` huge pages: the agent's, and that of a VM, which has them in another order and one page
/// between them.
fn memories(pages: u64) -> (Memory, Arc<Memory>, Vec<Extent>) {
    let file = memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 2 * pages * HUGE).unwrap();
    let region = |guest_addr, at| RegionConfig {
        guest_addr,
        user_addr: guest_addr,
        len: HUGE,
        fd_offset: at,
    };
    let place = |page: u64| (2 * (pages - page) - 1) * HUGE;
    let of_agent = (0..pages).map(|page| (&file, region(page * HUGE, place(page))));
    let of_agent = Memory::map(of_agent.collect()).unwrap();
    let all = RegionConfig {
        len: 2 * pages * HUGE,
        ..region(0, 0)
    };
    let of_vm = Memory::map(vec![(&file, all)]).unwrap();
    let extents = (0..pages).map(|page| Extent {
        addr: place(page),
        len: HUGE,
    });
    (of_agent, Arc::new(of_vm), extents.collect())
}

fn register(extents: Vec<Extent>) -> Register {
    Register {
        attachment: ID,
        endpoint: AttachRequest::default(),
        extents,
    }
}

/// The daemon's end of the stream.
struct Daemon {
    socket: UnixStream,
    reader: RequestReader,
    received: Vec<u8>,
}

impl Daemon {
    /// The next request; `None`: the agent has closed the stream.
    fn request(&mut self) -> Option<Request> {
        loop {
            if let Some((request, len)) = self.reader.decode(&self.received).unwrap() {
                self.received.drain(..len);
                return Some(request);
            }
            let mut bytes = [0; 4096];
            match self.socket.read(&mut bytes).unwrap() {
                0 => return None,
                len => self.received.extend(&bytes[..len]),
            }
        }
    }

    fn answer(&mut self, answer: Answer) {
        self.socket.write_all(&encode_answer(&answer)).unwrap();
    }
}

/// The agent's end of a stream to `daemon` on a thread of its own.
fn serve<T: Send + 'static>(
    daemon: impl FnOnce(Daemon) -> T + Send + 'static,
) -> (OwnedFd, JoinHandle<T>) {
    let (ours, socket) = UnixStream::pair().unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let daemon = move || {
        daemon(Daemon {
            socket,
            reader: RequestReader::new(&key(), &NONCE),
            received: Vec::new(),
        })
    };
    (ours.into(), thread::spawn(daemon))
}

/// A stream to a daemon that sends these answers: the first at once, each other one when a request has arrived.
fn answering(answers: impl IntoIterator<Item = Answer> + Send + 'static) -> OwnedFd {
    let (ours, _) = serve(move |mut daemon| {
        for (index, answer) in answers.into_iter().enumerate() {
            if index > 0 && daemon.request().is_none() {
                return;
            }
            daemon.answer(answer);
        }
        // Until the agent closes it.
        while daemon.request().is_some() {}
    });
    ours
}

fn open(socket: OwnedFd) -> Result<Stream, RegistrationError> {
    Stream::open(socket, &key(), deadline())
}

fn registered(socket: OwnedFd) -> Result<Registered, RegistrationError> {
    let (memory, _, extents) = memories(1);
    open(socket)?.register(register(extents), &memory, deadline())
}

#[test]
fn an_endpoint_is_registered_started_and_ended() {
    let (memory, of_vm, extents) = memories(3);
    let pages = 3 * HUGE / PAGE;
    let request = register(extents.clone());
    let expected = Request::Register(request.clone());
    let (socket, daemon) = serve(move |mut daemon| {
        daemon.answer(Answer::Hello(NONCE));
        assert_eq!(daemon.request(), Some(expected));
        let view = Memory::of_extents(&of_vm, &extents).unwrap();
        assert_eq!(find_wrong_page(&view, &NONCE, 0..pages), None);
        daemon.answer(ACCEPTED);
        assert_eq!(daemon.request(), Some(Request::Start(START)));
        // Only the last value of each huge page is left.
        for number in 0..pages {
            let mut piece = Vec::new();
            let len = VALUE_LEN as u32;
            view.translate(number * PAGE + VALUE_AT, len, &mut piece)
                .unwrap();
            let value = match number % 512 {
                511 => page_value(&NONCE, number),
                _ => [0; VALUE_LEN],
            };
            assert_eq!(view.read_array(&piece, 0), Some(value), "page {number}");
        }
        daemon.answer(Answer::Started { features: 0b11 });
        assert_eq!(daemon.request(), Some(Request::End));
        daemon.answer(Answer::Ended(Reason::REQUESTED));
        assert_eq!(daemon.request(), None);
    });
    let mut endpoint = open(socket)
        .unwrap()
        .register(request, &memory, deadline())
        .unwrap();
    assert_eq!((endpoint.cid, endpoint.token), (CID, TOKEN));
    assert_eq!(endpoint.start(START, deadline()).unwrap(), 0b11);
    assert_eq!(endpoint.has_ended().unwrap(), None);
    assert_eq!(endpoint.end(deadline()).unwrap(), Reason::REQUESTED);
    drop(endpoint);
    daemon.join().unwrap();
}

#[test]
fn answers_may_arrive_in_single_bytes_and_two_at_once() {
    let (socket, daemon) = serve(|mut daemon| {
        for byte in encode_answer(&Answer::Hello(NONCE)) {
            daemon.socket.write_all(&[byte]).unwrap();
        }
        daemon.request().unwrap();
        let both = [ACCEPTED, Answer::Ended(Reason::REMOVED)];
        let both = both.map(|answer| encode_answer(&answer)).concat();
        let (first, rest) = both.split_at(30);
        daemon.socket.write_all(first).unwrap();
        daemon.socket.write_all(rest).unwrap();
        daemon
    });
    let mut endpoint = registered(socket).unwrap();
    let daemon = daemon.join().unwrap();
    assert_eq!(endpoint.has_ended().unwrap(), Some(Reason::REMOVED));
    assert_eq!(endpoint.has_ended().unwrap(), None);
    drop(daemon);
    assert!(matches!(
        endpoint.has_ended(),
        Err(RegistrationError::Closed)
    ));
}

#[test]
fn a_query_tells_whether_an_attachment_is_in_use() {
    for known in [true, false] {
        let (socket, daemon) = serve(move |mut daemon| {
            daemon.answer(Answer::Hello(NONCE));
            assert_eq!(daemon.request(), Some(Request::Query(ID)));
            daemon.answer(Answer::Known(known));
        });
        assert_eq!(open(socket).unwrap().query(ID, deadline()).unwrap(), known);
        daemon.join().unwrap();
    }
}

/// Every answer in the place of every other one is an error, and refusals and ends say which.
#[test]
fn an_answer_to_another_request_is_an_error() {
    let refusal = Refusal {
        reason: Reason::OUTSIDE,
        index: 7,
    };
    let hello = Answer::Hello(NONCE);
    let started = Answer::Started { features: 0 };
    let answers = [
        hello,
        ACCEPTED,
        started,
        Answer::Known(true),
        Answer::Refused(refusal),
        Answer::Ended(Reason::REMOVED),
    ];
    let expect = |answer: Answer, result: Result<(), RegistrationError>| match answer {
        Answer::Refused(_) => {
            let Err(RegistrationError::Refused(got)) = result else {
                panic!("{result:?}");
            };
            assert_eq!(got, refusal);
            let text = RegistrationError::Refused(got).to_string();
            assert!(text.ends_with("(extent 7)"), "{text}");
        }
        Answer::Ended(_) => assert!(
            matches!(result, Err(RegistrationError::Ended(Reason::REMOVED))),
            "{result:?}"
        ),
        _ => assert!(
            matches!(result, Err(RegistrationError::OtherAnswer)),
            "{answer:?}: {result:?}"
        ),
    };
    for answer in answers {
        if answer != hello {
            let result = open(answering([answer])).map(drop);
            match answer {
                Answer::Ended(_) => assert!(matches!(result, Err(RegistrationError::OtherAnswer))),
                _ => expect(answer, result),
            }
        }
        if answer != ACCEPTED {
            expect(answer, registered(answering([hello, answer])).map(drop));
        }
        if answer != Answer::Known(true) {
            let stream = open(answering([hello, answer])).unwrap();
            expect(answer, stream.query(ID, deadline()).map(drop));
        }
        let with_endpoint = || registered(answering([hello, ACCEPTED, answer])).unwrap();
        if answer != started {
            expect(answer, with_endpoint().start(START, deadline()).map(drop));
        }
        // The answer to a start that came too late to be waited for does not hide the end.
        if !matches!(answer, Answer::Ended(_) | Answer::Refused(_)) && answer != started {
            expect(answer, with_endpoint().end(deadline()).map(drop));
        }
    }
    // Features that were not requested.
    let more = Answer::Started { features: 0b100 };
    let mut endpoint = registered(answering([hello, ACCEPTED, more])).unwrap();
    expect(more, endpoint.start(START, deadline()).map(drop));
}

#[test]
fn an_end_is_found_behind_the_answer_to_a_start() {
    for late in [
        Answer::Started { features: 0 },
        Answer::Refused(Reason::RINGS.into()),
    ] {
        let (socket, daemon) = serve(move |mut daemon| {
            daemon.answer(Answer::Hello(NONCE));
            daemon.request().unwrap();
            daemon.answer(ACCEPTED);
            daemon.request().unwrap();
            assert_eq!(daemon.request(), Some(Request::End));
            daemon.answer(late);
            daemon.answer(Answer::Ended(Reason::REQUESTED));
            daemon.request()
        });
        let mut endpoint = registered(socket).unwrap();
        let error = endpoint.start(START, Instant::now()).unwrap_err();
        assert!(matches!(error, RegistrationError::TimedOut), "{error}");
        assert_eq!(endpoint.end(deadline()).unwrap(), Reason::REQUESTED);
        drop(endpoint);
        daemon.join().unwrap();
    }
}

#[test]
fn an_end_is_not_waited_for_longer_because_other_answers_keep_coming() {
    let (socket, daemon) = serve(|mut daemon| {
        daemon.answer(Answer::Hello(NONCE));
        daemon.request().unwrap();
        daemon.answer(ACCEPTED);
        assert_eq!(daemon.request(), Some(Request::End));
        let flood = encode_answer(&Answer::Started { features: 0 }).repeat(1000);
        // Until the agent closes the stream.
        while daemon.socket.write_all(&flood).is_ok() {}
    });
    let mut endpoint = registered(socket).unwrap();
    let soon = Instant::now() + Duration::from_millis(100);
    let error = endpoint.end(soon).unwrap_err();
    assert!(matches!(error, RegistrationError::TimedOut), "{error}");
    assert!(Instant::now() >= soon);
    drop(endpoint);
    daemon.join().unwrap();
}

#[test]
fn a_refusal_is_read_from_a_stream_that_is_closed() {
    let refusal = Answer::Refused(Reason::NOT_PERMITTED.into());
    let (socket, daemon) = serve(move |mut daemon| {
        daemon.answer(Answer::Hello(NONCE));
        daemon.answer(refusal);
    });
    daemon.join().unwrap();
    let error = registered(socket).unwrap_err();
    let RegistrationError::Refused(got) = error else {
        panic!("{error}");
    };
    assert_eq!(Answer::Refused(got), refusal);
}

/// A caller gives pages back to its kernel after these only.
#[test]
fn refusals_free_pages_unless_an_earlier_attachment_may_have_them() {
    let refused = |reason: Reason| RegistrationError::Refused(reason.into()).frees_pages();
    for reason in [Reason::IN_USE, Reason::ATTACHMENT_IN_USE] {
        assert!(!refused(reason), "{reason}");
    }
    for reason in [
        Reason::FAILED,
        Reason::FULL,
        Reason::NOT_PERMITTED,
        Reason::OUTSIDE,
    ] {
        assert!(refused(reason), "{reason}");
    }
    assert!(RegistrationError::Ended(Reason::REMOVED).frees_pages());
    assert!(!RegistrationError::Closed.frees_pages());
    assert!(!RegistrationError::TimedOut.frees_pages());
}

#[test]
fn an_end_of_the_stream_garbage_and_silence_are_errors() {
    let hello = encode_answer(&Answer::Hello(NONCE));
    for len in [0, 1, hello.len() - 1] {
        let part = hello[..len].to_vec();
        let (socket, daemon) = serve(move |mut daemon| daemon.socket.write_all(&part).unwrap());
        daemon.join().unwrap();
        let error = open(socket).unwrap_err();
        assert!(matches!(error, RegistrationError::Closed), "{len}: {error}");
    }
    let (socket, daemon) = serve(|mut daemon| daemon.socket.write_all(b"HTTP/1.1 400").unwrap());
    let error = open(socket).unwrap_err();
    let expected = RegistrationError::Wire(WireError::NotThisProtocol);
    assert_eq!(error.to_string(), expected.to_string());
    daemon.join().unwrap();

    let (ours, _theirs) = UnixStream::pair().unwrap();
    let soon = Instant::now() + Duration::from_millis(20);
    let error = Stream::open(ours.into(), &key(), soon).unwrap_err();
    assert!(matches!(error, RegistrationError::TimedOut), "{error}");
    assert!(Instant::now() >= soon);
}

#[test]
fn nothing_is_sent_for_memory_of_another_length_or_too_many_extents() {
    let (memory, _, mut extents) = memories(2);
    let mut refuse = |change: &mut dyn FnMut(&mut Vec<Extent>)| {
        let (socket, daemon) = serve(|mut daemon| {
            daemon.answer(Answer::Hello(NONCE));
            daemon.request()
        });
        change(&mut extents);
        let stream = open(socket).unwrap();
        let error = stream
            .register(register(extents.clone()), &memory, deadline())
            .unwrap_err();
        assert_eq!(daemon.join().unwrap(), None);
        error
    };
    let error = refuse(&mut |extents| extents[0].len += HUGE);
    assert!(matches!(error, RegistrationError::Memory), "{error}");
    let error = refuse(&mut |extents| {
        extents.pop();
        extents[0].len = HUGE;
    });
    assert!(matches!(error, RegistrationError::Memory), "{error}");
    let error = refuse(&mut |extents| {
        extents.push(Extent { addr: 0, len: HUGE });
        extents.resize(MAX_EXTENTS + 1, Extent { addr: 0, len: 0 });
    });
    assert!(matches!(error, RegistrationError::TooMany), "{error}");
}
