//! The library's sockets as a side: each step is a call of [`zerosock::vsock`] on a thread of its
//! own; errors get the names that a kernel uses.

mod transfer;

use std::collections::HashMap;
use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use zerosock::vsock::{
    Endpoint, Host, Listener, OwnedLease, Poller, Readiness, SeqPacket, SeqPacketListener, Stream,
    Wait,
};
use zerosock::{Address, Cid, Port};
use zerosock_cli::vm::pattern::Pattern;
use zerosock_testkit::calls::{Call, Kind, Number, Setting};
use zerosock_testkit::protocol::{Command, Outcome, ShutdownDirection, Socket, Source};

use super::side::{Side, Started};
use transfer::{
    Flow, counted, nonblocking, of, receive, receive_all, receive_record, send_all, sent,
};

/// Common interface of an endpoint and a host.
pub(crate) trait Place: Send + Sync {
    fn cid(&self) -> Cid;
    fn socket(&self) -> zerosock::vsock::Socket;
    fn drive(&self) -> bool;
}

impl Place for Endpoint {
    fn cid(&self) -> Cid {
        Endpoint::cid(self)
    }
    fn socket(&self) -> zerosock::vsock::Socket {
        Endpoint::socket(self)
    }
    fn drive(&self) -> bool {
        Endpoint::drive(self).is_ok()
    }
}

impl Place for Host {
    fn cid(&self) -> Cid {
        Cid::HOST
    }
    fn socket(&self) -> zerosock::vsock::Socket {
        Host::socket(self)
    }
    fn drive(&self) -> bool {
        Host::drive(self).is_ok()
    }
}

/// An endpoint or a host, and its open sockets.
pub(crate) struct Library {
    shared: Arc<Shared>,
    /// Drives it between calls: a kernel has threads for that.
    pump: Option<JoinHandle<()>>,
}

struct Shared {
    place: Box<dyn Place>,
    table: Mutex<Table>,
    over: AtomicBool,
}

#[derive(Default)]
struct Table {
    last: Socket,
    open: HashMap<Socket, Open>,
    /// Leases that are kept.
    leases: HashMap<Socket, Vec<OwnedLease>>,
}

#[derive(Clone)]
enum Open {
    Idle(Kind, Arc<Mutex<zerosock::vsock::Socket>>),
    Stream(Arc<Stream>),
    Listener(Arc<Listener>),
    Records(Arc<SeqPacket>),
    RecordListener(Arc<SeqPacketListener>),
}

impl Library {
    pub(crate) fn new(place: impl Place + 'static) -> Library {
        let shared = Arc::new(Shared {
            place: Box::new(place),
            table: Mutex::default(),
            over: AtomicBool::new(false),
        });
        let driven = shared.clone();
        let pump = thread::spawn(move || {
            while !driven.over.load(Ordering::Relaxed) && driven.place.drive() {
                thread::sleep(Duration::from_micros(200));
            }
        });
        Library {
            shared,
            pump: Some(pump),
        }
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        if let Some(pump) = self.pump.take() {
            let _ = pump.join();
        }
    }
}

impl Side for Library {
    fn cid(&self) -> u32 {
        self.shared.place.cid().get()
    }

    fn start(&self, command: Command) -> Started {
        let (sender, answer) = channel();
        let shared = self.shared.clone();
        thread::spawn(move || {
            let start = Instant::now();
            let outcome = shared.run(command).map(|outcome| Outcome {
                elapsed_us: u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX),
                ..outcome
            });
            // The thread that began the step may have given up.
            let _ = sender.send(outcome);
        });
        Started::Here(answer)
    }

    fn kernel(&self) -> Option<(u32, u32)> {
        None
    }
}

type Answer = Result<Outcome, String>;

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, open: Open) -> Outcome {
        let mut table = self.table();
        table.last += 1;
        let socket = table.last;
        table.open.insert(socket, open);
        Outcome {
            socket: Some(socket),
            ..Outcome::default()
        }
    }

    fn find(&self, socket: Socket) -> Result<Open, String> {
        let found = self.table().open.get(&socket).cloned();
        found.ok_or(format!("no socket {socket}"))
    }

    fn stream(&self, socket: Socket) -> Result<Arc<Stream>, String> {
        match self.find(socket)? {
            Open::Stream(stream) => Ok(stream),
            _ => Err(format!("socket {socket} is not connected")),
        }
    }

    /// A connection, stream or SEQPACKET.
    fn flow(&self, socket: Socket) -> Result<Arc<dyn Flow + Send + Sync>, String> {
        match self.find(socket)? {
            Open::Stream(stream) => Ok(stream),
            Open::Records(records) => Ok(records),
            _ => Err(format!("socket {socket} is not connected")),
        }
    }

    fn idle(&self, socket: Socket) -> Result<(Kind, Arc<Mutex<zerosock::vsock::Socket>>), String> {
        match self.find(socket)? {
            Open::Idle(kind, idle) => Ok((kind, idle)),
            _ => Err(format!("socket {socket} is in use")),
        }
    }

    fn run(&self, command: Command) -> Answer {
        Ok(match command {
            Command::Call(call) => return self.call(call),
            Command::Send {
                socket,
                source: Source::Pattern { seed, len },
                chunks,
            } => send_all(&*self.flow(socket)?, seed, len, &chunks),
            Command::Receive { socket, limit, .. } => receive_all(&*self.flow(socket)?, limit),
            Command::Poll { socket, timeout_ms } => {
                let open = self.find(socket)?;
                let mut poller = Poller::new(Wait::Sleep);
                match &open {
                    Open::Stream(stream) => poller.add_stream(stream, 1, Readiness::READABLE),
                    Open::Records(records) => {
                        poller.add_seqpacket(records, 1, Readiness::READABLE);
                    }
                    _ => return Err(format!("socket {socket} is not connected")),
                }
                match poller.wait(Some(Duration::from_millis(timeout_ms.into()))) {
                    Ok(ready) => Outcome {
                        end: !ready.is_empty(),
                        ..Outcome::default()
                    },
                    Err(error) => of(Err(error)),
                }
            }
            Command::Shutdown { socket, how } => {
                let how = match how {
                    ShutdownDirection::Receive => Shutdown::Read,
                    ShutdownDirection::Send => Shutdown::Write,
                    ShutdownDirection::Both => Shutdown::Both,
                };
                match self.find(socket)? {
                    Open::Records(records) => of(records.shutdown(how)),
                    _ => of(self.stream(socket)?.shutdown(how)),
                }
            }
            Command::Close { socket } => {
                // Dropping the last reference closes it.
                let open = self.table().open.remove(&socket);
                let leases = self.table().leases.remove(&socket);
                drop((leases, open));
                Outcome::default()
            }
            other => return Err(format!("not a step of the library's: {other:?}")),
        })
    }

    fn call(&self, call: Call) -> Answer {
        Ok(match call {
            Call::Socket { kind } => {
                let socket = Arc::new(Mutex::new(self.place.socket()));
                self.add(Open::Idle(kind, socket))
            }
            Call::Bind { socket, cid, port } => {
                let port = port.map_or(Port::ANY, Port::new);
                let cid = cid.map_or(Cid::ANY, Cid::new);
                let (_, idle) = self.idle(socket)?;
                of(locked(&idle).bind(Address::new(cid, port)))
            }
            Call::Connect { socket, cid, port } => {
                let (kind, idle) = self.idle(socket)?;
                let (mut idle, peer) = (locked(&idle), address(cid, port));
                let connected = match kind {
                    Kind::Stream => idle.connect(peer).map(|it| Open::Stream(Arc::new(it))),
                    Kind::SeqPacket => {
                        let connected = idle.connect_seqpacket(peer);
                        connected.map(|it| Open::Records(Arc::new(it)))
                    }
                };
                self.becomes(socket, connected)
            }
            Call::ConnectAndClose { cid, port, times } => {
                for _ in 0..times {
                    let begun = self.place.socket().begin_connect(address(cid, port));
                    if let Err(error) = begun {
                        return Ok(of(Err(error)));
                    }
                }
                Outcome::default()
            }
            Call::Listen { socket, backlog } => {
                let (kind, idle) = self.idle(socket)?;
                let (mut idle, backlog) = (locked(&idle), backlog as usize);
                let listener = match kind {
                    Kind::Stream => idle.listen(backlog).map(|it| Open::Listener(Arc::new(it))),
                    Kind::SeqPacket => {
                        let listener = idle.listen_seqpacket(backlog);
                        listener.map(|it| Open::RecordListener(Arc::new(it)))
                    }
                };
                self.becomes(socket, listener)
            }
            Call::Accept { socket, timeout_ms } => {
                let time = Duration::from_millis(timeout_ms.into());
                let accepted = match self.find(socket)? {
                    Open::Listener(listener) => {
                        let accepted = listener.accept_timeout(time);
                        accepted.map(|(it, peer)| (Open::Stream(Arc::new(it)), peer))
                    }
                    Open::RecordListener(listener) => {
                        let accepted = listener.accept_timeout(time);
                        accepted.map(|(it, peer)| (Open::Records(Arc::new(it)), peer))
                    }
                    _ => return Err(format!("socket {socket} does not listen")),
                };
                match accepted {
                    Ok((open, peer)) => Outcome {
                        peer: Some((peer.cid.get(), peer.port.get())),
                        ..self.add(open)
                    },
                    Err(error) if error.kind() == ErrorKind::TimedOut => Outcome {
                        errno: Some("ETIMEDOUT".into()),
                        ..Outcome::default()
                    },
                    Err(error) => of(Err(error)),
                }
            }
            Call::Name { socket } => {
                let address = match self.find(socket)? {
                    Open::Idle(_, idle) => locked(&idle).local_addr(),
                    Open::Stream(stream) => Some(stream.local_addr()),
                    Open::Listener(listener) => Some(listener.local_addr()),
                    Open::Records(records) => Some(records.local_addr()),
                    Open::RecordListener(listener) => Some(listener.local_addr()),
                };
                Outcome {
                    peer: address.map(|it| (it.cid.get(), it.port.get())),
                    ..Outcome::default()
                }
            }
            Call::Send {
                socket,
                seed,
                len,
                now,
            } => {
                let bytes = Pattern::bytes(seed, len);
                match self.find(socket)? {
                    Open::Stream(stream) if now => {
                        nonblocking(&stream, |mut stream| stream.write(&bytes))
                    }
                    Open::Stream(stream) => sent(len, (&*stream).write_all(&bytes)),
                    Open::Records(records) => sent(len, records.send(&bytes)),
                    _ => return Err(format!("socket {socket} is not connected")),
                }
            }
            Call::SendRecord { socket, seed, len } => match self.find(socket)? {
                Open::Records(records) => sent(len, records.send_eor(&Pattern::bytes(seed, len))),
                _ => return Err(format!("socket {socket} carries no records")),
            },
            Call::Lease { socket, len } => self.lease(socket, len)?,
            Call::Receive { socket, len, flags } => match self.find(socket)? {
                Open::Records(records) => receive_record(&records, len, flags),
                _ => receive(&*self.stream(socket)?, len, flags),
            },
            Call::Set { socket, setting } => self.set(socket, setting)?,
            Call::Get { socket, number } => {
                let number = match (self.find(socket)?, number) {
                    (Open::Stream(stream), Number::Unsent) => stream.unsent(),
                    (Open::Stream(stream), Number::Unread) => stream.unread(),
                    (Open::Stream(stream), Number::BufferSize) => stream.buffer_size() as usize,
                    (Open::Idle(_, idle), Number::BufferSize) => {
                        locked(&idle).buffer_size() as usize
                    }
                    (Open::Listener(it), Number::BufferSize) => it.buffer_size() as usize,
                    (Open::Records(records), Number::Unsent) => records.unsent(),
                    (Open::Records(records), Number::Unread) => records.unread_bytes(),
                    (Open::Records(records), Number::BufferSize) => records.buffer_size() as usize,
                    _ => return Err(format!("socket {socket} has no {number:?}")),
                };
                counted(number)
            }
            Call::SendParts { .. }
            | Call::Completions { .. }
            | Call::ReceiveNowhere { .. }
            | Call::SocketsUsed => return Err("only a kernel can".into()),
        })
    }

    /// Receives at least this many bytes in leases that are kept.
    fn lease(&self, socket: Socket, len: usize) -> Answer {
        let (stream, mut leased) = (self.stream(socket)?, 0);
        while leased < len {
            match stream.recv() {
                Ok(Some(lease)) => {
                    leased += lease.len();
                    let mut table = self.table();
                    let kept = table.leases.entry(socket).or_default();
                    kept.push(lease.into_owned());
                }
                Ok(None) => break,
                Err(error) => return Ok(of(Err(error))),
            }
        }
        Ok(counted(leased))
    }

    /// The outcome of a change of state.
    fn becomes(&self, socket: Socket, open: std::io::Result<Open>) -> Outcome {
        match open {
            Ok(open) => {
                self.table().open.insert(socket, open);
                Outcome::default()
            }
            Err(error) => of(Err(error)),
        }
    }

    fn set(&self, socket: Socket, setting: Setting) -> Answer {
        let linger = |seconds: Option<u32>| seconds.map(|it| Duration::from_secs(it.into()));
        let time = |ms: u32| (ms > 0).then(|| Duration::from_millis(ms.into()));
        Ok(of(match self.find(socket)? {
            Open::Idle(_, idle) => {
                let mut idle = locked(&idle);
                match setting {
                    Setting::BufferBounds(min, max) => idle.set_buffer_bounds(min, max),
                    Setting::BufferSize(bytes) => idle.set_buffer_size(bytes),
                    Setting::ConnectTimeout(ms) => {
                        idle.set_connect_timeout(Duration::from_millis(ms.into()))
                    }
                    Setting::LowWater(bytes) => idle.set_low_water(bytes),
                    Setting::Linger(seconds) => {
                        idle.set_linger(linger(seconds));
                        Ok(())
                    }
                    Setting::ReceiveTimeout(ms) => idle.set_read_timeout(time(ms)),
                    Setting::ZeroCopy => return Err("only a kernel can".into()),
                }
            }
            Open::Stream(stream) => match setting {
                Setting::BufferBounds(min, max) => stream.set_buffer_bounds(min, max),
                Setting::BufferSize(bytes) => stream.set_buffer_size(bytes),
                Setting::LowWater(bytes) => stream.set_low_water(bytes),
                Setting::Linger(seconds) => {
                    stream.set_linger(linger(seconds));
                    Ok(())
                }
                Setting::ReceiveTimeout(ms) => stream.set_read_timeout(time(ms)),
                Setting::ConnectTimeout(_) | Setting::ZeroCopy => {
                    return Err("not of a stream".into());
                }
            },
            Open::Records(records) => match setting {
                Setting::BufferBounds(min, max) => records.set_buffer_bounds(min, max),
                Setting::BufferSize(bytes) => records.set_buffer_size(bytes),
                Setting::Linger(seconds) => {
                    records.set_linger(linger(seconds));
                    Ok(())
                }
                Setting::ReceiveTimeout(ms) => records.set_read_timeout(time(ms)),
                _ => return Err("not of records".into()),
            },
            Open::RecordListener(_) => return Err("not of a listener".into()),
            Open::Listener(listener) => match setting {
                Setting::BufferSize(bytes) => listener.set_buffer_size(bytes),
                _ => return Err("not of a listener".into()),
            },
        }))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn address(cid: u32, port: u32) -> Address {
    Address::new(Cid::new(cid), Port::new(port))
}
