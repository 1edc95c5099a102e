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

/// A VM whose worker answers at once, and its listener's path.
struct Lab {
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

impl Lab {
    fn new() -> Lab {
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
        Lab {
            vm,
            mailbox,
            counters,
            dir,
        }
    }

    /// A front-end that connects, and what the control thread does about it.
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
fn a_silent_front_end_gives_way_to_one_that_waits() {
    let mut lab = Lab::new();
    let silent = lab.connect();
    lab.pass(10 * SILENCE);
    assert!(is_open(&silent), "nothing waits for its end");
    let waiting = lab.connect();
    let third = lab.connect();
    assert!(is_open(&silent) && is_open(&waiting) && !is_open(&third));
    lab.pass(SILENCE / 2);
    assert!(is_open(&silent), "not before its time");
    // Half a message is none.
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
fn a_front_end_that_speaks_in_time_stays_and_the_other_is_turned_away() {
    let mut lab = Lab::new();
    let first = lab.connect();
    let second = lab.connect();
    assert!(lab.vm.deadline().is_some() && is_open(&second));
    // Not read before the time is up.
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

/// Its own end of the connection lies in a message that is not read before the reply is taken.
#[test]
fn a_front_end_that_takes_no_reply_does_not_keep_its_place() {
    let mut lab = Lab::new();
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
fn one_that_waited_and_has_gone_makes_room_for_the_next() {
    let mut lab = Lab::new();
    let silent = lab.connect();
    drop(lab.connect());
    let waiting = lab.connect();
    lab.pass(SILENCE);
    assert!(!is_open(&silent) && is_open(&waiting));
    assert_eq!(lab.faults(Fault::Busy), 0);
}
