//! `zerosock guest` in stock guests, against a stand-in for the daemon that has the two ports of the host and sees the
//! guest's memory. A client without privileges gets an endpoint on pages that are where the agent says; refusals have
//! names; the pages stay pinned until the end is confirmed, whatever the client does with its file, and whichever of client,
//! agent and keeper is killed; a client that outlives its endpoint keeps its memory; the next agent asks before it frees
//! what an earlier one has left.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use zerosock::Cid;
use zerosock::attach::AttachRequest;
use zerosock::guest::key::{GuestKey, Nonce};
use zerosock::guest::page_value::{PAGE, find_wrong_page};
use zerosock::guest::wire::{
    Answer, AttachmentId, Reason, Register, Request, RequestReader, Token, encode_answer,
};
use zerosock::guest::{DOORBELL_PORT, REGISTRATION_PORT};
use zerosock_cli::vm::hybrid;
use zerosock_ring::{Extent, Memory};
use zerosock_testkit::device::{Device, Endpoint};
use zerosock_testkit::guest::NAME;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::remote::Pending;

use crate::Alone;
use crate::guest_pages::Machine;
use crate::lab::{STEP, Skipped, device_program, echo, short_dir};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("pages_stay_until_the_host_has_ended_on_6.12", || {
        agent("6.12")
    }),
    ("pages_stay_until_the_host_has_ended_on_6.1", || {
        agent("6.1")
    }),
];

const KEY: &[u8] = b"0123456789abcdef";
const NONCE: Nonce = Nonce([9; 32]);
const TOKEN: Token = Token([5; 16]);
const SOCKET: &str = "/run/zerosock/attach.sock";
/// Huge pages of the guest, and of an endpoint.
const ALL_PAGES: u64 = 4;
const PAGES: u64 = 2;
const HUGE: u64 = Extent::HUGE_PAGE;

/// The daemon's part of registration and doorbell, by hand.
struct StandIn {
    machine: Machine,
    registration: UnixListener,
    doorbell: UnixListener,
}

/// A registration stream of the agent.
struct Stream {
    socket: UnixStream,
    reader: RequestReader,
    received: Vec<u8>,
}

/// An endpoint of the agent, as far as the daemon has it.
struct Registered {
    stream: Stream,
    doorbell: UnixStream,
    id: AttachmentId,
    view: Memory,
}

impl Stream {
    /// The next request; `None`: the agent has closed the stream.
    fn request(&mut self) -> Option<Request> {
        loop {
            if let Some((request, len)) = self.reader.decode(&self.received).expect("a request") {
                self.received.drain(..len);
                return Some(request);
            }
            let mut bytes = [0; 4096];
            match self.socket.read(&mut bytes).unwrap_or(0) {
                0 => return None,
                len => self.received.extend(&bytes[..len]),
            }
        }
    }

    fn answer(&mut self, answer: Answer) {
        self.socket
            .write_all(&encode_answer(&answer))
            .expect("an agent");
    }
}

impl StandIn {
    /// The next stream, which has got its nonce.
    fn stream(&self) -> Stream {
        let socket = hybrid::accept(&self.registration, STEP).expect("a registration stream");
        socket.set_read_timeout(Some(STEP)).expect("a time limit");
        let key = GuestKey::new(KEY).expect("a key");
        let mut stream = Stream {
            socket,
            reader: RequestReader::new(&key, &NONCE),
            received: Vec::new(),
        };
        stream.answer(Answer::Hello(NONCE));
        stream
    }

    /// Grants the next registration, and starts its queues.
    fn endpoint(&self) -> Registered {
        let mut stream = self.stream();
        let Some(Request::Register(register)) = stream.request() else {
            panic!("not a registration");
        };
        let Register {
            attachment: id,
            endpoint,
            extents,
        } = register;
        assert_eq!(endpoint, AttachRequest::default());
        let view = self.machine.view(&extents);
        let pages = PAGES * HUGE / PAGE;
        assert_eq!(view.size(), PAGES * HUGE);
        assert_eq!(find_wrong_page(&view, &NONCE, 0..pages), None);
        let cid = Cid::new(0x4000_0007);
        stream.answer(Answer::Accepted { cid, token: TOKEN });
        let mut doorbell = hybrid::accept(&self.doorbell, STEP).expect("a doorbell");
        doorbell.set_read_timeout(Some(STEP)).expect("a time limit");
        let mut token = [0; 16];
        doorbell.read_exact(&mut token).expect("a token");
        assert_eq!(token, TOKEN.0);
        let Some(Request::Start(start)) = stream.request() else {
            panic!("not a start");
        };
        assert_eq!((start.features, start.queue_size), (1 << 32 | 1, 256));
        assert_eq!(start.rings, [0, 0x4000, 0x8000]);
        stream.answer(Answer::Started {
            features: start.features,
        });
        let mut byte = [0];
        doorbell.read_exact(&mut byte).expect("a wake-up");
        doorbell.write_all(&byte).expect("a doorbell");
        Registered {
            stream,
            doorbell,
            id,
            view,
        }
    }

    fn start_agent(&self) {
        let options = "--key /key --memory 4M --endpoints 2 --attach-uid 65534 --socket-mode 0666";
        let script = format!("echo $$ > /tmp/pid; exec /bin/zerosock guest {options}");
        let argv = ["/bin/busybox", "sh", "-c", &script].map(str::to_owned);
        let start = Command::Start { argv: argv.into() };
        let started = self.machine.guest.remote.run(start, STEP);
        started.expect("an agent");
    }

    /// Until the agent listens.
    fn wait_for_agent(&self) {
        let deadline = Instant::now() + STEP;
        // A client that takes no memory is refused by name, when one is served at all.
        while !self.client("--memory 0").contains("attach=MemoryOnly") {
            let console = self.machine.guest.console.tail(20);
            assert!(
                Instant::now() < deadline,
                "the agent does not listen:\n{console}"
            );
        }
    }

    fn script(options: &str) -> String {
        let attach = format!("/bin/zerosock {NAME} attach --socket {SOCKET} {options}");
        format!("/bin/zerosock {NAME} unprivileged -- {attach}")
    }

    /// Runs a client without privileges.
    fn client(&self, options: &str) -> String {
        self.machine.shell(&StandIn::script(options))
    }

    /// Starts one.
    fn start_client(&self, options: &str) -> Pending {
        let script = StandIn::script(options);
        let argv = ["/bin/busybox", "sh", "-c", &script].map(str::to_owned);
        self.machine
            .guest
            .remote
            .start(Command::Run { argv: argv.into() })
    }

    /// Sends a signal to processes of the guest with this in their command line.
    fn kill(&self, signal: &str, pattern: &str) {
        let script = format!(
            "for p in /proc/[0-9]*; do grep -q -- '{pattern}' $p/cmdline 2>/dev/null && kill -{signal} ${{p#/proc/}}; done"
        );
        self.machine.shell(&script);
    }

    /// Until no process has this in its command line.
    fn wait_for_end(&self, pattern: &str) {
        let script = format!("grep -l -- '{pattern}' /proc/[0-9]*/cmdline 2>/dev/null");
        let deadline = Instant::now() + STEP;
        loop {
            let text = self.machine.shell(&script);
            if text.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "{pattern} runs: {text}");
        }
    }

    /// The guest's kernel gives the pages of endpoints to nothing else, and they are where they were.
    fn assert_pinned(&self, endpoints: &[&Registered]) {
        let text = self.machine.pages(&format!("take --pages {ALL_PAGES}"));
        let free = ALL_PAGES - PAGES * endpoints.len() as u64;
        assert!(
            text.contains(&format!("{free} of {ALL_PAGES} are free")),
            "{text}"
        );
        let pages = (1..=PAGES).map(|huge| huge * HUGE / PAGE - 1);
        for page in pages {
            for endpoint in endpoints {
                let wrong = find_wrong_page(&endpoint.view, &NONCE, page..page + 1);
                assert_eq!(wrong, None);
            }
        }
    }

    /// The attachment that an agent asks for on the next stream.
    fn query(&self) -> (Stream, AttachmentId) {
        let mut stream = self.stream();
        match stream.request() {
            Some(Request::Query(id)) => (stream, id),
            other => panic!("not a query: {other:?}"),
        }
    }
}

fn text(client: Pending) -> String {
    let outcome = client.wait(STEP).expect("a client's end");
    outcome.text.unwrap_or_default()
}

fn assert_contains(text: &str, lines: &[&str]) {
    for line in lines {
        assert!(text.contains(line), "no {line}: {text}");
    }
}

const ATTACH: &str = "--memory 4194304";
/// The command lines of agent and keeper, in patterns that do not match themselves.
const AGENT: &str = "socket-mod[e]";
const KEEPER: &str = "guest-keepe[r]";

fn agent(release: &str) -> Result<(), Skipped> {
    let dir = short_dir();
    let endpoint = Endpoint::new(dir.path(), 3);
    let listen = |port| hybrid::listen(&endpoint.uds, port).expect("a port of the host");
    let (registration, doorbell) = (listen(REGISTRATION_PORT.get()), listen(DOORBELL_PORT.get()));
    let mut program = device_program();
    program.arguments.truncate(1);
    let device = Device::start(&program, std::slice::from_ref(&endpoint), echo("device"));
    let _device = device.expect("a device");
    let host = StandIn {
        machine: Machine::boot(release, Some(&endpoint.vhost))?,
        registration,
        doorbell,
    };
    let key = std::str::from_utf8(KEY).expect("text");
    let setup = format!(
        "echo {ALL_PAGES} > /proc/sys/vm/nr_hugepages; printf %s {key} > /key; chmod 600 /key"
    );
    assert_eq!(host.machine.shell(&setup), "");
    host.start_agent();
    host.wait_for_agent();
    refusals(&host);
    client_frees_its_file(&host);
    agent_is_killed(&host);
    keeper_is_killed(&host);
    agent_is_terminated(&host);
    Ok(())
}

fn refusals(host: &StandIn) {
    let root = format!("/bin/zerosock {NAME} attach --socket {SOCKET} {ATTACH}");
    assert_contains(&host.machine.shell(&root), &["attach=NotPermitted"]);
    assert_contains(&host.client("--memory 6291456"), &["attach=Full"]);
    let second = host
        .machine
        .shell("/bin/zerosock guest --key /key --socket /run/other.sock");
    assert_contains(&second, &["another `zerosock guest`"]);
    let other = host
        .machine
        .shell("chmod 644 /key; /bin/zerosock guest --key /key; chmod 600 /key");
    assert_contains(&other, &["--key /key", "mode 0644: change it to 0600"]);
    // By name and by status, before it makes anything.
    for privileges in ["unprivileged --uid 1000", "without-sys-admin"] {
        let agent = "/bin/zerosock guest --port-only --socket /tmp/other.sock";
        let text = host.machine.shell(&format!(
            "/bin/zerosock {NAME} {privileges} -- {agent}; echo status=$?"
        ));
        assert_contains(&text, &["this process needs CAP_SYS_ADMIN", "status=1"]);
    }
    // As in a privileged container: process 1 there has the same mounts as the agent.
    let container = "mount -t proc proc /proc; /bin/zerosock guest --key /key; true";
    let container = format!("/bin/busybox unshare -p -m -f sh -c '{container}'");
    assert_contains(
        &host.machine.shell(&container),
        &["run it outside of containers"],
    );
    // The host refuses by a reason.
    let client = host.start_client(ATTACH);
    let mut stream = host.stream();
    assert!(matches!(stream.request(), Some(Request::Register(_))));
    stream.answer(Answer::Refused(Reason::FULL.into()));
    assert_contains(&text(client), &["attach=Full"]);
    assert_eq!(stream.request(), None);
    host.machine.take_in_time(ALL_PAGES);
}

/// A client frees the pages while the host may still write them, and leaves.
fn client_frees_its_file(host: &StandIn) {
    let client = host.start_client(&format!("{ATTACH} --free"));
    let mut endpoint = host.endpoint();
    assert_eq!(endpoint.stream.request(), Some(Request::End));
    let text = text(client);
    assert_contains(
        &text,
        &["attach=Ok", "cid=1073741831 memory=4194304", "clear=true"],
    );
    let lines = [
        "resolve=UnknownName",
        "start=Ok features=0x100000001",
        "again=BadRequest",
        "doorbell=1",
    ];
    assert_contains(&text, &lines);
    host.assert_pinned(&[&endpoint]);
    endpoint.stream.answer(Answer::Ended(Reason::REQUESTED));
    assert_eq!(endpoint.stream.request(), None);
    assert_eq!(endpoint.doorbell.read(&mut [0; 1]).unwrap_or(0), 0);
    host.machine.take_in_time(ALL_PAGES);
}

fn agent_is_killed(host: &StandIn) {
    let attach = || {
        let client = host.start_client(&format!("{ATTACH} --free --stay"));
        (client, host.endpoint())
    };
    let (one, two) = (attach(), attach());
    host.kill("KILL", AGENT);
    let mut endpoints = Vec::new();
    for (client, mut endpoint) in [one, two] {
        assert_eq!(endpoint.stream.request(), None);
        // The client learns of it, and the host closes the doorbell, of which the client has a copy.
        drop(endpoint.doorbell.shutdown(std::net::Shutdown::Both));
        assert_contains(&text(client), &["end=0 doorbell=0"]);
        endpoints.push(endpoint);
    }
    let [one, two] = &endpoints[..] else {
        unreachable!()
    };
    host.assert_pinned(&[one, two]);

    // The next agent asks for both, whether or not the first is in use, and again until the host does not use the pages.
    host.start_agent();
    let (mut stream, first) = host.query();
    host.assert_pinned(&[one, two]);
    stream.answer(Answer::Known(true));
    let (mut stream, second) = host.query();
    stream.answer(Answer::Known(false));
    let (mut stream, third) = host.query();
    assert!(second != first && third == first);
    let held = if first == one.id { one } else { two };
    assert_eq!(first, held.id);
    host.assert_pinned(&[held]);
    stream.answer(Answer::Known(false));
    host.machine.take_in_time(ALL_PAGES);
}

/// Without a keeper nothing pins pages: the agent ends its endpoints, and itself.
fn keeper_is_killed(host: &StandIn) {
    host.wait_for_agent();
    let client = host.start_client(&format!("{ATTACH} --stay"));
    let mut endpoint = host.endpoint();
    host.kill("KILL", KEEPER);
    assert_eq!(endpoint.stream.request(), Some(Request::End));
    endpoint.stream.answer(Answer::Ended(Reason::REQUESTED));
    assert_contains(&text(client), &["end=0 doorbell=0", "kept=true"]);
    host.wait_for_end(AGENT);
    host.machine.take_in_time(ALL_PAGES);
}

/// SIGTERM ends the endpoints, then the agent, then the keeper.
fn agent_is_terminated(host: &StandIn) {
    host.start_agent();
    host.wait_for_agent();
    let client = host.start_client(&format!("{ATTACH} --stay"));
    let mut endpoint = host.endpoint();
    host.kill("TERM", AGENT);
    assert_eq!(endpoint.stream.request(), Some(Request::End));
    host.assert_pinned(&[&endpoint]);
    endpoint.stream.answer(Answer::Ended(Reason::REQUESTED));
    assert_contains(&text(client), &["end=0 doorbell=0", "kept=true"]);
    host.wait_for_end(AGENT);
    host.wait_for_end(KEEPER);
    host.machine.take_in_time(ALL_PAGES);
}
