use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};

use zerosock_sys::account::Budget;

use super::super::mailbox::{Mail, Mailbox};
use super::*;

struct Port;

impl DevicePort for Port {
    fn submit(&mut self, _: DeviceCommand, reply: Reply) {
        reply.done();
    }
}

/// A VM with a worker that answers at once.
struct Harness {
    vm: Vm,
    mailbox: Mailbox,
    counters: Arc<Counters>,
    dir: tempfile::TempDir,
}

/// A device of two queues and an empty configuration space.
#[derive(Debug)]
struct TestModel;

impl DeviceModel for TestModel {
    fn features(&self) -> u64 {
        0
    }

    fn max_queues(&self) -> u16 {
        2
    }

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
}

impl Harness {
    fn new() -> Harness {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let (mailbox, mail) = Mailbox::new().unwrap();
        let counters: Arc<Counters> = Arc::default();
        let spec = VmSpec {
            name: "vm0".into(),
            model: Arc::new(TestModel),
            socket: FrontendSocket::Listener(OwnedFd::from(listener).into()),
            max_queue_size: 128,
            sealed_memory: false,
            account: Budget::unlimited().account(),
            port: Box::new(Port),
        };
        let vm = Vm::new(spec, 0, mail, counters.clone(), Default::default()).unwrap();
        Harness {
            vm,
            mailbox,
            counters,
            dir,
        }
    }

    /// Connects a front-end and lets the VM accept it.
    fn connect(&mut self) -> UnixStream {
        let socket = UnixStream::connect(self.dir.path().join("s")).unwrap();
        socket.set_nonblocking(true).unwrap();
        self.vm.accept();
        self.take_mail();
        socket
    }

    fn take_mail(&mut self) {
        while let Some(mail) = self.mailbox.next() {
            if let Mail::Reply {
                sequence, reply, ..
            } = mail
            {
                self.vm.handle_reply(sequence, reply);
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.vm.time_passed(Instant::now() + time);
        self.take_mail();
    }

    fn faults(&self, fault: Fault) -> u64 {
        self.counters.snapshot().faults(fault)
    }
}

fn is_open(mut socket: &UnixStream) -> bool {
    assert!(zerosock_sys::reaper::drain(Duration::from_secs(60)));
    matches!(socket.read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// GET_FEATURES.
const MESSAGE: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn a_silent_front_end_is_disconnected_for_a_waiting_one() {
    let mut lab = Harness::new();
    let silent = lab.connect();
    lab.pass(10 * SILENCE);
    assert!(is_open(&silent), "nothing waits for its end");
    let waiting = lab.connect();
    let third = lab.connect();
    assert!(is_open(&silent) && is_open(&waiting) && !is_open(&third));
    lab.pass(SILENCE / 2);
    assert!(is_open(&silent), "not before its time");
    // Half a message does not count.
    (&silent).write_all(&MESSAGE[..6]).unwrap();
    lab.pass(SILENCE);
    assert!(!is_open(&silent) && is_open(&waiting));
    assert_eq!((lab.faults(Fault::Silent), lab.faults(Fault::Busy)), (1, 1));
    (&waiting).write_all(&MESSAGE).unwrap();
    lab.vm.handle_ready(false);
    let mut reply = [0; 20];
    assert_eq!(
        (&waiting).read(&mut reply).unwrap(),
        20,
        "the next is served"
    );
    assert_eq!(lab.vm.deadline(), None);
}

#[test]
fn a_message_in_time_keeps_the_front_end_and_turns_the_waiting_one_away() {
    let mut lab = Harness::new();
    let first = lab.connect();
    let second = lab.connect();
    assert!(lab.vm.deadline().is_some() && is_open(&second));
    // Not read before the deadline.
    (&first).write_all(&MESSAGE).unwrap();
    lab.pass(SILENCE);
    assert_eq!((&first).read(&mut [0; 20]).unwrap(), 20);
    assert!(is_open(&first) && !is_open(&second));
    assert_eq!((lab.faults(Fault::Silent), lab.faults(Fault::Busy)), (0, 1));
    let third = lab.connect();
    assert!(!is_open(&third) && is_open(&first));
    lab.pass(10 * SILENCE);
    assert!(is_open(&first));
}

#[test]
fn messages_with_many_descriptors_use_up_the_budget() {
    const MESSAGES: u64 = 4;
    // SET_OWNER, which has no reply.
    let message = [3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    let mut lab = Harness::new();
    let front = lab.connect();
    let file = tempfile::tempfile().unwrap();
    let files = [file.as_fd(); BUDGET];
    for _ in 0..MESSAGES {
        fd_passing::send(&front, &[IoSlice::new(&message)], &files).unwrap();
    }
    let before = lab.counters.snapshot().messages;
    for handled in 1..=MESSAGES {
        lab.vm.handle_ready(false);
        let messages = lab.counters.snapshot().messages;
        assert_eq!(messages - before, handled, "one message each time");
    }
}

/// The front-end's own end of the connection is in a message that stays unread.
#[test]
fn a_front_end_that_leaves_a_reply_unread_is_disconnected() {
    let mut lab = Harness::new();
    let front = lab.connect();
    while lab.vm.deadline().is_none() {
        (&front).write_all(&MESSAGE).unwrap();
        lab.vm.handle_ready(false);
    }
    fd_passing::send(&front, &[IoSlice::new(&MESSAGE)], &[front.as_fd()]).unwrap();
    drop(front);
    assert!(lab.vm.has_frontend(), "its end is still open");
    lab.pass(REPLY_LIMIT - Duration::from_secs(5));
    assert!(!lab.vm.is_idle());
    lab.pass(REPLY_LIMIT);
    assert!(lab.vm.is_idle());
    assert_eq!(lab.faults(Fault::Silent), 1);
}

#[test]
fn a_waiting_front_end_that_hung_up_is_replaced_by_the_next() {
    let mut lab = Harness::new();
    let silent = lab.connect();
    drop(lab.connect());
    let waiting = lab.connect();
    lab.pass(SILENCE);
    assert!(!is_open(&silent) && is_open(&waiting));
    assert_eq!(lab.faults(Fault::Busy), 0);
}
