//! The journal of a VM's front-end: recording results, and repeating the requests of a predecessor.

use zerosock_sys::fd_passing;

use super::connection::{Replay, Request};
use super::{Front, Vm};
use crate::codec::{self, DecodeError};
use crate::journal::{self, RestoredFrontend};

impl Vm {
    /// Continues the connection that a predecessor of this process had.
    pub(super) fn continue_connection(&mut self, restored: RestoredFrontend) {
        let RestoredFrontend {
            socket,
            next_number,
            kept,
            pending,
        } = restored;
        let socket = socket.owned_by(&self.account);
        let is_pending = pending.is_some();
        // The predecessor may have been killed before it had taken the request from the socket.
        let taken = match is_pending {
            true => fd_passing::peek_offset(&socket)
                .map_err(DecodeError::Io)
                .and_then(|bytes| codec::discard(&socket, bytes, &self.account)),
            false => Ok(()),
        };
        let requests = journal::in_order(kept, &self.account);
        let pending = pending.map(|record| record.decode(&self.account).ok_or(()));
        let replay = match (requests, pending.transpose(), taken) {
            (Some(requests), Ok(pending), Ok(())) => Some(Replay {
                requests: requests.into_iter().chain(pending).collect(),
                is_last_unanswered: is_pending,
            }),
            _ => None,
        };
        let is_usable = replay.is_some();
        self.begin(socket, Some(next_number), replay.unwrap_or_default());
        match is_usable {
            true => tracing::info!(
                vm = %self.name,
                "continues the front-end's connection, which another process had"
            ),
            false => self.disconnect("the journal of its connection cannot be used"),
        }
    }

    /// Carries out the requests of a predecessor's journal, if any are left.
    pub(super) fn repeat_requests(&mut self) {
        if let Front::Live(connection) = &self.front
            && !connection.replay.requests.is_empty()
        {
            self.serve();
        }
    }

    /// Records the result of the request that was carried out, with its reply.
    pub(super) fn record(&mut self, is_refused: bool, reply: &[u8]) {
        let (Some(journal), Front::Live(connection)) = (&mut self.journal, &self.front) else {
            return;
        };
        let Request {
            key,
            number,
            is_answered,
            is_whole,
        } = connection.request;
        let is_written = match (is_answered, is_refused) {
            (true, true) => return self.disconnect("a request of its journal is refused"),
            (true, false) => return,
            (false, true) => journal.finish(None, &[], reply),
            (false, false) => {
                let place = key.kept().filter(|_| is_whole);
                journal.finish(place, &connection.session.changes(key, number), reply)
            }
        };
        if !is_written {
            self.reply(reply.to_vec());
        }
    }
}
