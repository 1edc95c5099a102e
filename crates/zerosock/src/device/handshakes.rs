//! Handshakes of hybrid vsock: host programs send a CONNECT line before their first byte.

use super::state::timers::Timer;
use super::virtio::HANDSHAKE;
use super::{Context, Device};
use crate::device::host_sockets::HostSocket;
use crate::device::host_sockets::hybrid::{self, Line};
use crate::device::state::host::{Caller, Handshake};
use crate::stats::RefusalCause;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_virtio::poller::{Interest, Readiness, Token};

impl Device {
    pub(super) fn begin_handshake(
        &mut self,
        socket: HostSocket,
        socket_type: SocketType,
        cx: &mut Context<'_>,
    ) {
        // Most programs have sent the line already: such a socket is added to the poller once, as a
        // bridge's.
        let line = hybrid::read_line(&socket, socket_type);
        if line != Line::Partial {
            return self.end_handshake(socket, socket_type, line, false, cx);
        }
        let limit = cx.shared.limits.handshakes;
        if self.handshakes.len() >= limit {
            cx.shared.counters.refuse(RefusalCause::Limit);
            return self.warn(&format!(
                "host program refused: {limit} others have not sent their CONNECT lines yet"
            ));
        }
        let deadline = cx.now + cx.shared.limits.handshake;
        let entry = self.handshakes.vacant_entry();
        let key = entry.key() as u32;
        let token = Token {
            device: self.addr.number,
            kind: HANDSHAKE,
            key,
        };
        // Bytes that have arrived since the line was read are reported.
        if let Err(error) = cx.poller.add(&socket, token, Interest::ReadUntilEnd) {
            self.warn(&format!(
                "cannot add a host program's socket to the poller: {error}"
            ));
            return;
        }
        entry.insert(Handshake {
            socket,
            socket_type,
            deadline,
        });
        self.timers.set(deadline, Timer::Handshake(key));
    }

    /// Handles bytes from a host program with an incomplete CONNECT line, and its end.
    pub(crate) fn handshake_ready(&mut self, key: u32, readiness: Readiness, cx: &mut Context<'_>) {
        let Some(handshake) = self.handshakes.get(key as usize) else {
            return;
        };
        let line = match hybrid::read_line(&handshake.socket, handshake.socket_type) {
            // No byte follows those that were read: the peek does not consume them, so it never
            // returns 0 for the end of file behind them.
            Line::Partial if readiness.peer_finished() => Line::CLOSED,
            line => line,
        };
        if line != Line::Partial {
            let done = self.handshakes.remove(key as usize);
            self.timers.cancel(done.deadline, Timer::Handshake(key));
            self.end_handshake(done.socket, done.socket_type, line, true, cx);
        }
    }

    /// Connects the program that has sent this line, or refuses it. `watched`: its socket is in the
    /// poller.
    fn end_handshake(
        &mut self,
        socket: HostSocket,
        socket_type: SocketType,
        line: Line,
        watched: bool,
        cx: &mut Context<'_>,
    ) {
        match line {
            Line::Connect(to) => {
                let caller = Caller {
                    socket,
                    socket_type,
                    to,
                    wants_ok: true,
                    forwarded: None,
                };
                self.call_guest(caller, watched, cx);
            }
            Line::Bad(reason) => {
                if watched {
                    forget_handshake(&socket, cx);
                }
                tracing::debug!(cid = %self.cid, reason, "host program refused: bad CONNECT line");
                cx.shared.counters.bad_handshakes.add(1);
            }
            Line::Partial => {}
        }
    }

    pub(super) fn handshake_timed_out(&mut self, key: u32, cx: &Context<'_>) {
        let due = self
            .handshakes
            .get(key as usize)
            .is_some_and(|h| h.deadline <= cx.now);
        if due {
            let handshake = self.handshakes.remove(key as usize);
            forget_handshake(&handshake.socket, cx);
            tracing::debug!(cid = %self.cid, "host program refused: no CONNECT line in time");
            cx.shared.counters.bad_handshakes.add(1);
        }
    }
}

/// Removes a handshake's socket from the poller before it is dropped.
pub(super) fn forget_handshake(socket: &HostSocket, cx: &Context<'_>) {
    if socket.is_closed_later() {
        // An event of the open socket would be attributed to the next handshake with this key.
        cx.poller.remove(socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::lab::Lab;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;
    use zerosock_virtio::poller::{Events, Poller};

    /// A program that has sent these bytes, and whose handshake has begun.
    fn begin(device: &mut Device, bytes: &[u8], cx: &mut Context<'_>) -> UnixStream {
        let (ours, mut program) = UnixStream::pair().unwrap();
        let permit = device.account.take_descriptors(1).unwrap();
        program.write_all(bytes).unwrap();
        let socket = HostSocket::accepted(ours.into(), permit);
        device.begin_handshake(socket, SocketType::Stream, cx);
        program
    }

    /// Handles the events that are there.
    fn dispatch(device: &mut Device, cx: &mut Context<'_>) {
        let mut events = Events::default();
        events.wait(cx.poller, Some(Duration::ZERO)).unwrap();
        for (token, readiness) in Poller::interpret(&events) {
            device.handshake_ready(token.key, readiness, cx);
        }
    }

    #[test]
    fn an_end_of_file_behind_part_of_a_line_ends_the_handshake() {
        for half in [false, true] {
            let mut lab = Lab::new();
            let (device, mut cx) = lab.lend();
            let program = begin(device, b"CONN", &mut cx);
            dispatch(device, &mut cx);
            assert_eq!(device.handshakes.len(), 1, "the program may send the rest");
            let _half_closed = half.then(|| {
                program.shutdown(std::net::Shutdown::Write).unwrap();
                program.try_clone().unwrap()
            });
            drop(program);
            dispatch(device, &mut cx);
            assert_eq!(device.handshakes.len(), 0, "half: {half}");
            assert_eq!(cx.shared.counters.bad_handshakes.get(), 1);
        }
    }

    #[test]
    fn a_program_may_shut_down_sending_behind_its_line() {
        let mut lab = Lab::new();
        let (device, mut cx) = lab.lend();
        let mut program = begin(device, b"CONN", &mut cx);
        program.write_all(b"ECT 1\nall").unwrap();
        program.shutdown(std::net::Shutdown::Write).unwrap();
        dispatch(device, &mut cx);
        // The guest was asked for the connection: no driver runs here.
        assert_eq!(cx.shared.counters.bad_handshakes.get(), 0);
        assert_eq!(cx.shared.counters.conns_refused.get(), 1);
    }

    #[test]
    fn a_full_table_of_handshakes_refuses_and_counts() {
        let mut lab = Lab::new();
        let (device, mut cx) = lab.lend();
        let _first = begin(device, b"C", &mut cx);
        let _second = begin(device, b"C", &mut cx);
        assert_eq!(device.handshakes.len(), cx.shared.limits.handshakes);
        assert_eq!(cx.shared.counters.refused_by_limit.get(), 1);
    }

    #[test]
    fn refused_handshake_leaves_the_poller_before_it_is_closed() {
        let mut lab = Lab::new();
        let (device, mut cx) = lab.lend();
        let (ours, mut program) = UnixStream::pair().unwrap();
        // As if the reaper had not closed it yet.
        let open = ours.try_clone().unwrap();
        let permit = device.account.take_descriptors(1).unwrap();
        let socket = HostSocket::accepted(ours.into(), permit);
        assert!(socket.is_closed_later());
        program.write_all(b"CONNECT").unwrap();
        device.begin_handshake(socket, SocketType::Stream, &mut cx);
        program.write_all(b" 1\n").unwrap();
        dispatch(device, &mut cx);
        assert_eq!(cx.shared.counters.conns_refused.get(), 1);
        program.write_all(b"x").unwrap();
        let mut events = Events::default();
        events.wait(cx.poller, Some(Duration::ZERO)).unwrap();
        let sources: Vec<_> = Poller::interpret(&events)
            .map(|(source, _)| source)
            .collect();
        assert!(sources.is_empty(), "{sources:?}");
        drop(open);
    }
}
