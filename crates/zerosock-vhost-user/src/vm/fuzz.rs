//! Entry point of the fuzz target `vhost_user` (docs/fuzzing.md): a front-end and its VM, with a worker that answers at
//! once, a journal, and successors.

use std::io::{IoSlice, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use zerosock_sys::fd_passing;
use zerosock_sys::mailbox::Mailbox;

use super::super::mailbox::{Mail, MailSender};
use super::test_lab::{Held, State, Steps, lock, spec};
use super::{Front, Vm};

/// Calls that a VM may need until it waits for the front-end.
const CALLS: usize = 1000;

/// A front-end's connection to a VM.
pub struct World {
    front_end: UnixStream,
    vm: Vm,
    mailbox: Mailbox<Mail>,
    held: Arc<Mutex<Held>>,
    state: Arc<Mutex<State>>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("World")
    }
}

impl World {
    /// A VM with a journal or without.
    pub fn new(has_journal: bool) -> World {
        World::begin(has_journal, None)
    }

    /// A VM with a front-end, or with that of a predecessor which has left this.
    fn begin(has_journal: bool, held: Option<Held>) -> World {
        let (front_end, ours) = UnixStream::pair().unwrap();
        front_end.set_nonblocking(true).unwrap();
        ours.set_nonblocking(true).unwrap();
        let (mail, mailbox) = MailSender::new().unwrap();
        let state = Arc::default();
        let (restored, new) = match &held {
            Some(held) => (Some(held.restore(ours.into())), None),
            None => (None, Some(ours)),
        };
        let held = Arc::new(Mutex::new(held.unwrap_or_default()));
        let mut spec = spec(
            Arc::clone(&state),
            Arc::clone(&held),
            Steps::endless(),
            restored,
        );
        spec.journal = spec.journal.filter(|_| has_journal);
        let mut world = World {
            front_end,
            vm: Vm::new(spec, 0, mail, Arc::default(), Default::default()).unwrap(),
            mailbox,
            held,
            state,
        };
        if let Some(ours) = new {
            world.vm.connect(OwnedFd::from(ours).into());
        }
        world.run();
        world
    }

    /// Whether the front-end is connected.
    pub fn is_connected(&self) -> bool {
        matches!(self.vm.front, Front::Live(_))
    }

    /// The front-end sends bytes and descriptors, which the VM handles.
    pub fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        // Fails when the VM has disconnected.
        let _ = fd_passing::send(&self.front_end, &[IoSlice::new(bytes)], fds);
        self.run();
    }

    /// The VM handles what there is. Each reply has the version of the protocol, and the length that it says.
    fn run(&mut self) {
        for call in 0.. {
            assert!(call < CALLS, "the VM never waits for its front-end");
            let mut any = false;
            for mail in self.mailbox.drain() {
                if let Mail::Reply {
                    sequence, reply, ..
                } = mail
                {
                    any = true;
                    self.vm.handle_reply(sequence, reply);
                }
            }
            let queued = |vm: &Vm| match &vm.front {
                Front::Live(it) => rustix::io::ioctl_fionread(&it.socket).unwrap_or(0),
                _ => 0,
            };
            let before = queued(&self.vm);
            self.vm.handle_ready(false);
            let mut replies = Vec::new();
            let _ = self.front_end.read_to_end(&mut replies);
            while let Some((header, rest)) = replies.split_first_chunk::<12>() {
                assert_eq!(header[4] & 3, 1, "a reply of another version");
                let len = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
                let (_, rest) = rest.split_at_checked(len as usize).expect("a reply is cut");
                replies = rest.to_vec();
            }
            assert!(replies.is_empty(), "a reply is cut");
            if !any && queued(&self.vm) == before {
                return;
            }
        }
    }

    /// The front-end's requests, as its supervisor has them. The successor writes replies itself.
    fn take_journal(&mut self) -> Held {
        let mut held = lock(&self.held);
        Held {
            kept: std::mem::take(&mut held.kept),
            ..Held::default()
        }
    }

    /// A successor gets the journal: it accepts all that is kept, and comes to the same state.
    pub fn succeed(&mut self) {
        if !self.is_connected() || lock(&self.held).pending.is_some() {
            return;
        }
        let (held, before) = (self.take_journal(), Arc::clone(&self.state));
        let wanted = lock(&before).clone();
        *self = World::begin(true, Some(held));
        assert!(
            self.is_connected(),
            "the successor refuses the journal; before: {wanted:?}"
        );
        assert_eq!(
            *lock(&self.state),
            wanted,
            "the successor has another state"
        );
    }

    /// As `succeed`, with a byte of a record changed. It may be refused.
    pub fn succeed_forged(&mut self, record: usize, at: usize, byte: u8) {
        let mut held = self.take_journal();
        let count = held.kept.len().max(1);
        if let Some(it) = held.kept.values_mut().nth(record % count) {
            let len = it.bytes.len().max(1);
            if let Some(place) = it.bytes.get_mut(at % len) {
                *place = byte;
            }
        }
        *self = World::begin(true, Some(held));
    }

    /// The front-end disconnects.
    pub fn end(mut self) {
        self.vm.handle_ready(true);
        self.vm.close("the input has ended");
        self.run();
        assert!(self.vm.is_over(), "the VM is not over");
    }
}
