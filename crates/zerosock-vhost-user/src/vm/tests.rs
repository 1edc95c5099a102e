use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Once;
use std::time::Duration;

use zerosock_sys::account::Budget;
use zerosock_sys::mailbox::Mailbox;

use super::super::mailbox::{Mail, MailSender};
use super::deadlines::{REPLY_LIMIT, SILENCE};
use super::driver::FIRST_BUFFER;
use super::*;

/// Keeps the memory, as a worker does.
#[derive(Default)]
struct Port(Option<Arc<zerosock_ring::Memory>>);

impl DevicePort for Port {
    fn submit(&mut self, command: DeviceCommand, reply: Reply) {
        match command {
            DeviceCommand::StopQueue { .. } => reply.base(0),
            DeviceCommand::SetMemory(memory) => {
                self.0 = Some(memory);
                reply.done();
            }
            _ => reply.done(),
        }
    }
}

/// A VM with a worker that answers at once.
struct Harness {
    vm: Vm,
    mailbox: Mailbox<Mail>,
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

    fn is_given_buffers_at_once(&self) -> bool {
        true
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
        install_log();
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let (mail, mailbox) = MailSender::new().unwrap();
        let counters: Arc<Counters> = Arc::default();
        let spec = VmSpec {
            name: "vm0".into(),
            model: Arc::new(TestModel),
            socket: FrontendSocket::Listener(OwnedFd::from(listener).into()),
            max_queue_size: 128,
            sealed_memory: false,
            account: Budget::unlimited().account(),
            port: Box::new(Port::default()),
            journal: None,
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
        for mail in self.mailbox.drain() {
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

    fn faults(&self, fault: FrontendFault) -> u64 {
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
    assert_eq!(
        (
            lab.faults(FrontendFault::Silent),
            lab.faults(FrontendFault::Busy)
        ),
        (1, 1)
    );
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
    assert_eq!(
        (
            lab.faults(FrontendFault::Silent),
            lab.faults(FrontendFault::Busy)
        ),
        (0, 1)
    );
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
    assert_eq!(lab.faults(FrontendFault::Silent), 1);
}

#[test]
fn a_waiting_front_end_that_hung_up_is_replaced_by_the_next() {
    let mut lab = Harness::new();
    let silent = lab.connect();
    drop(lab.connect());
    let waiting = lab.connect();
    lab.pass(SILENCE);
    assert!(!is_open(&silent) && is_open(&waiting));
    assert_eq!(lab.faults(FrontendFault::Busy), 0);
}

thread_local! {
    /// What this thread has logged, while [`logged`] runs on it.
    static LOG: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

/// Writes to [`LOG`] of the thread that logs.
struct ThreadLog;

impl Write for ThreadLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.with_borrow_mut(|log| log.as_mut().map(|log| log.extend_from_slice(bytes)));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes [`ThreadLog`] the log of all tests, before the first VM exists.
///
/// A log of one thread would not do: when a thread without one reaches a log statement first,
/// `tracing` may record that the statement has no reader, and skip it on all threads.
fn install_log() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(|| ThreadLog)
            .init();
    });
}

/// The lines that this thread logs while `work` runs.
fn logged(work: impl FnOnce()) -> String {
    LOG.set(Some(Vec::new()));
    work();
    String::from_utf8(LOG.take().unwrap()).unwrap()
}

const USER: u64 = 0x7000_0000;

/// A message of this request: header, then words of 64 bits.
fn message(request: u32, words: &[u64]) -> Vec<u8> {
    let size = 8 * words.len() as u32;
    let header = [request, 1, size];
    let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
    bytes
}

impl Harness {
    /// Sends a message of the front-end and lets the VM handle it.
    fn send(&mut self, front: &UnixStream, message: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) {
        fd_passing::send(front, &[IoSlice::new(message)], fds).unwrap();
        self.vm.handle_ready(false);
        self.take_mail();
    }

    /// Starts queues 0 and 1 of a driver with this memory, or with none.
    fn start_queues(&mut self, front: &UnixStream, memory: Option<&OwnedFd>) {
        self.send(front, &message(2, &[0]), &[]);
        if let Some(memory) = memory {
            // One region: guest address, size, user address, offset.
            let table = message(5, &[1, 0, 1 << 20, USER, 0]);
            self.send(front, &table, &[memory.as_fd()]);
        }
        for queue in 0..2_u64 {
            let at = USER + 0x10000 * queue;
            self.send(front, &message(8, &[queue | 128 << 32]), &[]);
            let rings = message(9, &[queue, at, at + 0x2000, at + 0x1000, 0]);
            self.send(front, &rings, &[]);
            let kick = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            self.send(front, &message(12, &[queue]), &[kick.as_fd()]);
        }
    }
}

fn guest_memory() -> OwnedFd {
    zerosock_sys::memfd::create("guest", 1 << 20, true).unwrap()
}

#[test]
fn the_log_says_when_a_driver_is_ready_and_when_it_goes() {
    let mut lab = Harness::new();
    let front = lab.connect();
    let memory = guest_memory();
    let said = logged(|| lab.start_queues(&front, Some(&memory)));
    assert_eq!(said.matches("driver ready").count(), 1, "{said}");
    assert!(said.contains("INFO") && said.contains("queues=2"), "{said}");
    // GET_VRING_BASE of both queues.
    let said = logged(|| {
        lab.send(&front, &message(11, &[0]), &[]);
        lab.send(&front, &message(11, &[1]), &[]);
    });
    assert_eq!(said.matches("driver gone").count(), 1, "{said}");
    lab.start_queues(&front, Some(&memory));
    drop(front);
    let said = logged(|| lab.vm.handle_ready(false));
    assert!(said.contains("driver gone"), "{said}");
}

/// As QEMU with memory-backend-file and without share=on: the rings here stay as they were.
#[test]
fn the_log_names_memory_that_is_not_shared() {
    let mut lab = Harness::new();
    let front = lab.connect();
    let memory = guest_memory();
    lab.start_queues(&front, Some(&memory));
    assert!(lab.vm.deadline().is_some());
    let said = logged(|| lab.pass(FIRST_BUFFER / 2));
    assert_eq!(said, "", "not before its time");
    let said = logged(|| lab.pass(FIRST_BUFFER));
    assert!(said.contains("WARN") && said.contains("share=on"), "{said}");
    assert_eq!(lab.vm.deadline(), None);
    drop(front);
    lab.vm.handle_ready(false);
    lab.take_mail();
    // A driver that has put a buffer into the first queue: the index of its available ring.
    let front = lab.connect();
    rustix::io::pwrite(&memory, &1_u16.to_le_bytes(), 0x1002).unwrap();
    lab.start_queues(&front, Some(&memory));
    let said = logged(|| lab.pass(FIRST_BUFFER));
    assert_eq!(said, "");
}

/// As QEMU without a memory backend: it sends no memory.
#[test]
fn the_log_names_memory_that_is_missing() {
    let mut lab = Harness::new();
    let front = lab.connect();
    let said = logged(|| lab.start_queues(&front, None));
    assert!(
        said.contains("there is no memory") && said.contains("share=on"),
        "{said}"
    );
}
