//! Two sides, and the steps of behaviours.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::calls::{Call, Kind, Number, RecvFlags, Setting};
use zerosock_testkit::protocol::{Command, Outcome, ShutdownDirection, Socket, Source};
use zerosock_testkit::remote;

/// Timeout of each step; generous, because a guest may be emulated on a busy machine.
pub(crate) const STEP: Duration = Duration::from_secs(40);
/// A connection that is closing without an answer is dropped after 8 s: an earlier end is an
/// answer.
pub(crate) const BEFORE_CLOSING_TIMES_OUT: Duration = Duration::from_secs(6);

/// Why a behaviour cannot be tested between these sides.
#[derive(Debug)]
pub(crate) struct Skip(pub(crate) String);

/// Tested, or skipped.
pub(crate) type Verdict = Result<(), Skip>;

/// A side that makes calls on sockets.
pub(crate) trait Side: Sync {
    /// Its CID.
    fn cid(&self) -> u32;

    /// Starts a step.
    fn start(&self, command: Command) -> Started;

    /// Major and minor number of the kernel of these sockets; `None` for the library.
    fn kernel(&self) -> Option<(u32, u32)>;
}

/// A running step.
pub(crate) enum Started {
    Guest(remote::Pending),
    Here(Receiver<Result<Outcome, String>>),
}

impl Started {
    pub(crate) fn wait(self) -> Outcome {
        match self {
            Started::Guest(pending) => pending.wait(STEP).expect("an outcome"),
            Started::Here(answer) => answer
                .recv_timeout(STEP)
                .expect("an outcome")
                .expect("a call that makes sense"),
        }
    }
}

/// Client and server.
pub(crate) struct Pair<'a> {
    pub(crate) client: &'a dyn Side,
    pub(crate) server: &'a dyn Side,
}

/// A socket of one of the sides; closed when dropped.
pub(crate) struct End<'a> {
    pub(crate) side: &'a dyn Side,
    socket: Socket,
    closed: bool,
    /// Bytes received so far of the pattern that the other end sends.
    received: RefCell<u64>,
}

static NEXT_PORT: AtomicU32 = AtomicU32::new(20_000);

/// A port that was not used before.
pub(crate) fn port() -> u32 {
    NEXT_PORT.fetch_add(1, Ordering::Relaxed)
}

impl dyn Side + '_ {
    pub(crate) fn run(&self, command: Command) -> Outcome {
        self.start(command).wait()
    }

    pub(crate) fn call(&self, call: Call) -> Outcome {
        self.run(Command::Call(call))
    }

    /// Skips unless the sockets are of a kernel of at least this version, `since` which it `does`.
    pub(crate) fn needs(&self, since: (u32, u32), does: &str) -> Verdict {
        match self.kernel() {
            None => Err(Skip(format!("only a kernel's sockets can show it: {does}"))),
            Some(kernel) if kernel < since => {
                let ((major, minor), (since_major, since_minor)) = (kernel, since);
                Err(Skip(format!(
                    "{does} since Linux {since_major}.{since_minor}, this is {major}.{minor}"
                )))
            }
            Some(_) => Ok(()),
        }
    }
}

impl<'a> Pair<'a> {
    /// Whether one of them is CID 2, with no device in between.
    pub(crate) fn has_host(&self) -> bool {
        [self.client, self.server]
            .iter()
            .any(|side| side.cid() == 2)
    }

    /// A socket that is neither connected nor listening.
    pub(crate) fn socket(side: &'a dyn Side, kind: Kind) -> Result<End<'a>, Skip> {
        let outcome = side.call(Call::Socket { kind });
        match outcome.socket {
            Some(socket) => Ok(End::new(side, socket)),
            None => Err(Skip(format!("no {kind:?} socket: {:?}", outcome.errno))),
        }
    }

    pub(crate) fn client_socket(&self) -> End<'a> {
        Pair::socket(self.client, Kind::Stream).expect("a socket")
    }

    pub(crate) fn server_socket(&self) -> End<'a> {
        Pair::socket(self.server, Kind::Stream).expect("a socket")
    }

    /// A listener of the server on `port`.
    pub(crate) fn listener(&self, port: u32, backlog: u32) -> End<'a> {
        let listener = self.listener_of(Kind::Stream, port, backlog);
        listener.expect("a listener for streams")
    }

    pub(crate) fn listener_of(&self, kind: Kind, port: u32, backlog: u32) -> Result<End<'a>, Skip> {
        let listener = Pair::socket(self.server, kind)?;
        listener.bind(Some(port)).ok();
        listener.listen(backlog).ok();
        Ok(listener)
    }

    /// Connects two sockets.
    pub(crate) fn join(&self, client: &End<'a>, listener: &End<'a>, port: u32) -> End<'a> {
        client.connect(self.server.cid(), port).ok();
        listener.accept()
    }

    /// A connection: the client's end, the server's end.
    pub(crate) fn connected(&self) -> (End<'a>, End<'a>) {
        self.connected_of(Kind::Stream).expect("streams")
    }

    pub(crate) fn connected_of(&self, kind: Kind) -> Result<(End<'a>, End<'a>), Skip> {
        let port = port();
        let listener = self.listener_of(kind, port, 4)?;
        let client = Pair::socket(self.client, kind)?;
        let served = self.join(&client, &listener, port);
        Ok((client, served))
    }
}

impl<'a> End<'a> {
    fn new(side: &'a dyn Side, socket: Socket) -> End<'a> {
        End {
            side,
            socket,
            closed: false,
            received: RefCell::new(0),
        }
    }

    pub(crate) fn id(&self) -> Socket {
        self.socket
    }

    pub(crate) fn bind(&self, port: Option<u32>) -> Outcome {
        self.bind_to(None, port)
    }

    pub(crate) fn bind_to(&self, cid: Option<u32>, port: Option<u32>) -> Outcome {
        let socket = self.socket;
        self.side.call(Call::Bind { socket, cid, port })
    }

    pub(crate) fn listen(&self, backlog: u32) -> Outcome {
        let socket = self.socket;
        self.side.call(Call::Listen { socket, backlog })
    }

    fn connect_call(&self, cid: u32, port: u32) -> Command {
        let socket = self.socket;
        Command::Call(Call::Connect { socket, cid, port })
    }

    pub(crate) fn connect(&self, cid: u32, port: u32) -> Outcome {
        self.side.run(self.connect_call(cid, port))
    }

    pub(crate) fn accept_for(&self, timeout_ms: u32) -> Result<(End<'a>, (u32, u32)), Outcome> {
        let socket = self.socket;
        let outcome = self.side.call(Call::Accept { socket, timeout_ms });
        match (outcome.socket, outcome.peer) {
            (Some(socket), Some(peer)) => Ok((End::new(self.side, socket), peer)),
            _ => Err(outcome),
        }
    }

    pub(crate) fn accept(&self) -> End<'a> {
        self.accept_from().0
    }

    pub(crate) fn accept_from(&self) -> (End<'a>, (u32, u32)) {
        let step = u32::try_from(STEP.as_millis()).unwrap_or(u32::MAX);
        self.accept_for(step).expect("a connection")
    }

    /// Its CID and port.
    pub(crate) fn name(&self) -> (u32, u32) {
        let socket = self.socket;
        let outcome = self.side.call(Call::Name { socket });
        outcome.peer.expect("a name")
    }

    pub(crate) fn start_send(&self, seed: u64, len: usize) -> Started {
        let (socket, now) = (self.socket, false);
        self.side.start(Command::Call(Call::Send {
            socket,
            seed,
            len,
            now,
        }))
    }

    /// One send of a pattern's first bytes.
    pub(crate) fn send(&self, seed: u64, len: usize) -> Outcome {
        self.start_send(seed, len).wait()
    }

    /// One non-blocking send.
    pub(crate) fn send_now(&self, seed: u64, len: usize) -> Outcome {
        let (socket, now) = (self.socket, true);
        self.side.call(Call::Send {
            socket,
            seed,
            len,
            now,
        })
    }

    /// One send that ends a record.
    pub(crate) fn send_record(&self, seed: u64, len: usize) -> Outcome {
        let socket = self.socket;
        self.side.call(Call::SendRecord { socket, seed, len })
    }

    /// Sends the given number of bytes of a pattern in pieces of these lengths, in turn.
    pub(crate) fn start_send_all(&self, seed: u64, len: u64, chunks: &[usize]) -> Started {
        self.side.start(Command::Send {
            socket: self.socket,
            source: Source::Pattern { seed, len },
            chunks: chunks.to_vec(),
        })
    }

    /// Receives the given number of bytes in leases that are kept until the socket is closed.
    pub(crate) fn lease(&self, len: usize) -> Outcome {
        let socket = self.socket;
        self.side.call(Call::Lease { socket, len })
    }

    pub(crate) fn receive_as(&self, len: usize, flags: RecvFlags) -> Outcome {
        let socket = self.socket;
        self.side.call(Call::Receive { socket, len, flags })
    }

    pub(crate) fn receive(&self, len: usize) -> Outcome {
        self.receive_as(len, RecvFlags::default())
    }

    pub(crate) fn receive_now(&self, len: usize) -> Outcome {
        self.receive_as(
            len,
            RecvFlags {
                dontwait: true,
                ..RecvFlags::default()
            },
        )
    }

    pub(crate) fn peek(&self, len: usize) -> Outcome {
        self.receive_as(
            len,
            RecvFlags {
                peek: true,
                ..RecvFlags::default()
            },
        )
    }

    /// Exactly `len` bytes, in as many calls as it takes.
    pub(crate) fn receive_all(&self, len: u64) -> Outcome {
        self.start_receive_all(Some(len)).wait()
    }

    pub(crate) fn start_receive_all(&self, limit: Option<u64>) -> Started {
        self.side.start(Command::Receive {
            socket: self.socket,
            limit,
            keep: false,
            acknowledge: false,
        })
    }

    pub(crate) fn set(&self, setting: Setting) -> Outcome {
        let socket = self.socket;
        self.side.call(Call::Set { socket, setting })
    }

    pub(crate) fn get(&self, number: Number) -> Outcome {
        let socket = self.socket;
        self.side.call(Call::Get { socket, number })
    }

    /// Whether it becomes readable before the timeout.
    pub(crate) fn poll(&self, time: Duration) -> bool {
        let timeout_ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        let socket = self.socket;
        self.side.run(Command::Poll { socket, timeout_ms }).end
    }

    pub(crate) fn shut(&self, how: ShutdownDirection) -> Outcome {
        let socket = self.socket;
        self.side.run(Command::Shutdown { socket, how })
    }

    /// Sends single bytes until this side knows the peer's shutdown; returns the error.
    pub(crate) fn send_until_error(&self) -> String {
        let give_up = Instant::now() + STEP;
        loop {
            let outcome = self.send_now(0, 1);
            match outcome.errno {
                Some(errno) if errno != "EAGAIN" => return errno,
                _ => assert!(Instant::now() < give_up, "sends go on for ever"),
            }
        }
    }

    pub(crate) fn start_close(mut self) -> Started {
        self.closed = true;
        let socket = self.socket;
        self.side.start(Command::Close { socket })
    }

    pub(crate) fn close(self) -> Outcome {
        self.start_close().wait()
    }
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        if !self.closed {
            // The outcome is not awaited.
            let socket = self.socket;
            self.side.start(Command::Close { socket });
        }
    }
}

/// Checks of an outcome.
pub(crate) trait Expect {
    /// No error.
    fn ok(&self);
    /// This error.
    fn fails(&self, errno: &str);
    /// The peer has refused, at once, by any of the error names for it.
    fn refused(&self);
    /// Exactly these bytes.
    fn is(&self, bytes: &[u8]);
    /// The first `len` bytes of a pattern.
    fn is_pattern(&self, seed: u64, len: usize);
}

impl Expect for Outcome {
    #[track_caller]
    fn ok(&self) {
        assert_eq!(self.errno, None);
    }

    #[track_caller]
    fn fails(&self, errno: &str) {
        assert_eq!(self.errno.as_deref(), Some(errno), "{self:?}");
    }

    #[track_caller]
    fn refused(&self) {
        let names = ["ECONNRESET", "ECONNREFUSED"];
        let errno = self.errno.as_deref().unwrap_or("nothing");
        assert!(names.contains(&errno), "{self:?}");
    }

    #[track_caller]
    fn is(&self, bytes: &[u8]) {
        assert_eq!(
            (self.errno.as_deref(), self.bytes),
            (None, bytes.len() as u64)
        );
        assert_eq!(self.sha256, Some(sha256(bytes)), "other bytes");
    }

    #[track_caller]
    fn is_pattern(&self, seed: u64, len: usize) {
        self.is(&Pattern::bytes(seed, len));
    }
}
