//! The journal of a VM: what a successor of this process needs to continue the connection of its
//! front-end.
//!
//! A front-end waits for the reply to a request, some for ever. So a request goes into the journal
//! before it is taken from the socket, and its reply goes out together with the change of the
//! journal that records the result. A process that is killed between any two steps leaves a journal
//! and a socket from which the successor knows whether the request was taken and whether it was
//! answered.
//!
//! What is kept of a request that was carried out is the request itself, under a key by which a
//! later one replaces it. The successor gives the kept requests to an ordinary
//! [`Session`](crate::session::Session), in an order that every session accepts, and then repeats the
//! one that was not answered. So a journal is checked as a front-end's messages are.
//!
//! # Limits
//! A request that arrives in parts is taken from the socket first. Front-ends send each with one
//! call.

use std::fmt;
use std::os::fd::BorrowedFd;

use vhost::vhost_user::message::FrontendReq;
use zerosock_sys::PeerFd;
use zerosock_sys::account::Account;

use crate::codec::{Message, decode_request, encode_request, examine};

/// The length of a request's number, which is in front of its encoded form.
const NUMBER: usize = size_of::<u64>();

/// The kept requests in the order in which a session accepts all of them. Others are not kept.
const ORDER: [FrontendReq; 16] = [
    FrontendReq::SET_OWNER,
    FrontendReq::SET_PROTOCOL_FEATURES,
    FrontendReq::SET_BACKEND_REQ_FD,
    FrontendReq::NET_SET_MTU,
    FrontendReq::SET_FEATURES,
    FrontendReq::SET_CONFIG,
    FrontendReq::SET_MEM_TABLE,
    FrontendReq::SET_LOG_BASE,
    FrontendReq::SET_VRING_NUM,
    FrontendReq::SET_VRING_ADDR,
    FrontendReq::SET_VRING_BASE,
    FrontendReq::SET_VRING_CALL,
    FrontendReq::SET_VRING_ERR,
    FrontendReq::SET_VRING_ENABLE,
    FrontendReq::SET_VRING_KICK,
    FrontendReq::SET_STATUS,
];

/// Where a request is kept.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Key {
    /// The number of the request in the vhost-user specification.
    pub request: u32,
    /// The queue that it concerns, or the offset in the configuration space; otherwise zero.
    pub index: u32,
}

/// A change of the kept requests.
#[derive(Debug)]
pub enum Change<'a> {
    /// Keep this request, with these descriptors, in the place of an earlier one.
    Keep {
        /// Where.
        key: Key,
        /// Its encoded form.
        bytes: Vec<u8>,
        /// The descriptors.
        fds: Vec<BorrowedFd<'a>>,
    },
    /// Drop what is kept under this key, if anything is.
    Drop(Key),
    /// Drop all that is kept of requests with this number.
    DropAll(u32),
}

/// Records what a front-end does. Called on the control thread: no call may wait for a peer.
///
/// Each call takes effect as a whole or not at all, also if the process is killed during the call,
/// and in the order of the calls.
pub trait Journal: Send {
    /// A front-end has connected. Returns the number of its first request, from which it counts. A
    /// random one, so that no two requests to a device have the same.
    fn connected(&mut self, socket: BorrowedFd<'_>) -> u64;

    /// A request has arrived, and is carried out next. `request` is its encoded form.
    fn begin(&mut self, request: &[u8], fds: &[BorrowedFd<'_>]);

    /// The request was carried out or refused. It is kept under `place`, or dropped; `changes` come
    /// after that. `reply`, if not empty, is written to the socket. Returns false if nothing of this can
    /// be done: then the caller writes the reply.
    fn finish(&mut self, place: Option<Key>, changes: &[Change<'_>], reply: &[u8]) -> bool;

    /// The front-end has gone: all of it is dropped.
    fn disconnected(&mut self);
}

/// The journal of a VM.
pub struct VmJournal {
    /// Records what the front-ends do.
    pub writer: Box<dyn Journal>,
    /// The connection that a predecessor of this process had.
    pub restored: Option<RestoredFrontend>,
}

impl fmt::Debug for VmJournal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmJournal")
            .field("restored", &self.restored)
            .finish_non_exhaustive()
    }
}

/// A request as it was recorded.
#[derive(Debug)]
pub struct Record {
    /// Its encoded form.
    pub bytes: Vec<u8>,
    /// Its descriptors.
    pub fds: Vec<PeerFd>,
}

/// The connection of a front-end as its journal has it.
#[derive(Debug)]
pub struct RestoredFrontend {
    /// The connection.
    pub socket: PeerFd,
    /// The number of the next request, as in [`Journal::connected`].
    pub next_number: u64,
    /// The kept requests, in the order in which they were recorded.
    pub kept: Vec<Record>,
    /// The request that was begun and not finished.
    pub pending: Option<Record>,
}

/// The encoded form of a request with its number.
pub(crate) fn encode(message: &Message) -> Vec<u8> {
    let mut bytes = message.number.to_ne_bytes().to_vec();
    bytes.extend(encode_request(message));
    bytes
}

/// The encoded form of a request that has the effect of others before it.
pub(crate) fn encode_derived(number: u64, request: u32, payload: Vec<u8>) -> Vec<u8> {
    encode(&Message {
        request,
        need_reply: false,
        payload,
        fds: Vec::new(),
        number,
    })
}

impl Record {
    /// The message, with its descriptors examined as if they had just arrived. `None`: not one that
    /// was recorded.
    pub(crate) fn decode(self, account: &Account) -> Option<Message> {
        let fds = examine(self.fds, account);
        let (number, request) = self.bytes.split_first_chunk::<NUMBER>()?;
        let mut message = decode_request(request, fds)?;
        message.number = u64::from_ne_bytes(*number);
        Some(message)
    }
}

/// The kept requests as messages, in the order for a session. `None`: one is none that is kept.
pub(crate) fn in_order(kept: Vec<Record>, account: &Account) -> Option<Vec<Message>> {
    let mut ranked = Vec::with_capacity(kept.len());
    for record in kept {
        let message = record.decode(account)?;
        let request = FrontendReq::try_from(message.request).ok()?;
        let rank = ORDER.iter().position(|&other| other == request)?;
        ranked.push((rank, message));
    }
    ranked.sort_by_key(|(rank, _)| *rank);
    Some(ranked.into_iter().map(|(_, message)| message).collect())
}

impl Key {
    /// The key itself, if requests of its kind are kept as they are.
    pub(crate) fn kept(self) -> Option<Key> {
        let request = FrontendReq::try_from(self.request).ok()?;
        ORDER.contains(&request).then_some(self)
    }
}
