//! The examples of docs/forward.md: the lines that it has for a guest run in one as they stand. The servers
//! of this machine are in this process, and rules of the device lead to them.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use zerosock_testkit::protocol::{Command, Outcome};

use super::sockmap::loopback_up;
use crate::lab::{Lab, STEP};

const GUIDE: &str = include_str!("../../../../../docs/forward.md");
const PAGE: &str = "A page of the host.";
const NAME: &str = "example.com";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);

/// The servers of this machine, and where a rule has the device listen.
pub(crate) struct Network {
    web: TcpListener,
    names: UdpSocket,
    entry: SocketAddr,
}

impl Network {
    pub(crate) fn new() -> Network {
        let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let web = TcpListener::bind(free).expect("a port for the web server");
        let names = UdpSocket::bind(free).expect("a port for the name server");
        let entry = TcpListener::bind(free).and_then(|socket| socket.local_addr());
        Network {
            web,
            names,
            entry: entry.expect("a port for the guest's page"),
        }
    }

    /// The rules of the guide, with these servers.
    pub(crate) fn rules(&self) -> Vec<OsString> {
        let web = self.web.local_addr().expect("an address");
        let names = self.names.local_addr().expect("an address");
        let rules = [
            "--forward".to_owned(),
            format!("8080=tcp:{web}"),
            "--forward".to_owned(),
            format!("53=udp:{names}"),
            "--listen".to_owned(),
            format!("tcp:{}=3:80", self.entry),
        ];
        rules.map(OsString::from).into()
    }
}

/// The lines of a section that are for the guest, and those for the host behind them.
fn lines<const N: usize>(title: &str) -> [&'static str; N] {
    let start = GUIDE.find(&format!("\n## {title}\n")).expect("the section");
    let section = &GUIDE[start + 4..];
    let section = section.split("\n## ").next().unwrap_or_default();
    let code = section
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter(|line| !line.starts_with("zerosock serve") && !line.trim().starts_with("--"));
    let code: Vec<_> = code.collect();
    let shown = format!("the lines of {title:?}: {code:?}");
    code.try_into().unwrap_or_else(|_| panic!("{shown}"))
}

fn argv(line: &str) -> Vec<String> {
    ["/bin/busybox", "sh", "-c", line]
        .map(str::to_owned)
        .to_vec()
}

/// Runs a line in the guest that ends in `&`.
fn start(lab: &Lab, line: &str) {
    assert!(line.ends_with('&'), "{line}");
    lab.a.run(Command::Start { argv: argv(line) });
}

fn run(lab: &Lab, line: &str) -> Outcome {
    lab.a.run(Command::Run { argv: argv(line) })
}

/// Runs a line until it shows `wanted`: nothing else tells that what it needs listens.
fn until(lab: &Lab, line: &str, wanted: &str) {
    let deadline = Instant::now() + STEP;
    loop {
        let said = run(lab, line).text.unwrap_or_default();
        if said.contains(wanted) {
            return;
        }
        assert!(Instant::now() < deadline, "{line}: {said}");
    }
}

/// What the test needs besides what a guest has anyway. False: it cannot run here.
fn is_ready(lab: &Lab, name: &str) -> bool {
    let lacking = match (&lab.network, &lab.socat) {
        (None, _) => Some("the other device has no rules"),
        (_, Some(reason)) => Some(reason.as_str()),
        _ => None,
    };
    if let Some(reason) = lacking {
        println!("SKIPPED {name}: {reason}");
        return false;
    }
    loopback_up(lab);
    run(lab, "mkdir -p /etc");
    true
}

/// Serves the page to all that ask for it in the right way, until this process ends.
fn serve(web: &TcpListener) {
    let web = web.try_clone().expect("the listener");
    thread::spawn(move || {
        for stream in web.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
                request.push(byte[0]);
            }
            let request = String::from_utf8_lossy(&request);
            let is_right = request.starts_with("GET / HTTP/1.")
                && request.contains(&format!("\r\nHost: {NAME}\r\n"));
            let page = if is_right { PAGE } else { "not this one" };
            let length = page.len();
            let _ = write!(
                stream,
                "HTTP/1.0 200 OK\r\nContent-Length: {length}\r\n\r\n{page}"
            );
        }
    });
}

/// Answers questions for addresses of [`NAME`], until this process ends.
fn answer(names: &UdpSocket) {
    const HEADER: usize = 12;
    let names = names.try_clone().expect("the socket");
    let mut asked = Vec::new();
    for label in NAME.split('.') {
        asked.push(label.len() as u8);
        asked.extend_from_slice(label.as_bytes());
    }
    asked.push(0);
    thread::spawn(move || {
        let mut buffer = [0; 1500];
        while let Ok((length, from)) = names.recv_from(&mut buffer) {
            let question = HEADER..HEADER + asked.len() + 4;
            if length < question.end {
                continue;
            }
            let mut reply = buffer[..question.end].to_vec();
            let is_name = reply[HEADER..].starts_with(&asked);
            // Type A, class IN.
            let has_address = is_name && reply.ends_with(&[0, 1, 0, 1]);
            // A response; the name exists, or does not.
            reply[2..4].copy_from_slice(if is_name {
                &[0x81, 0x80]
            } else {
                &[0x81, 0x83]
            });
            let answers = u8::from(has_address);
            reply[4..HEADER].copy_from_slice(&[0, 1, 0, answers, 0, 0, 0, 0]);
            if has_address {
                // The name of the question, the type and the class, 60 s, four bytes.
                reply.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
                reply.extend_from_slice(&ADDRESS.octets());
            }
            let _ = names.send_to(&reply, from);
        }
    });
}

pub(crate) fn fetch_a_page(lab: &Lab) {
    let [by_vsock, listen, by_tcp] = lines("Fetch a page from a guest");
    if !is_ready(lab, "guide_fetch_a_page") {
        return;
    }
    serve(&lab.network.as_ref().expect("a network").web);
    let said = run(lab, by_vsock).text.unwrap_or_default();
    assert!(said.ends_with(PAGE), "{by_vsock}: {said}");
    start(lab, listen);
    until(lab, by_tcp, PAGE);
}

pub(crate) fn serve_a_page(lab: &Lab) {
    let [page, server, listen, on_the_host] = lines("Serve a page from a guest");
    if !is_ready(lab, "guide_serve_a_page") {
        return;
    }
    assert_eq!(run(lab, page).bytes, 0, "{page}");
    assert_eq!(run(lab, server).bytes, 0, "{server}");
    start(lab, listen);
    // As curl does.
    assert_eq!(on_the_host, "curl http://127.0.0.1:8000/");
    let entry = lab.network.as_ref().expect("a network").entry;
    let deadline = Instant::now() + STEP;
    loop {
        let mut client = TcpStream::connect(entry).expect("the device listens");
        client
            .set_read_timeout(Some(STEP))
            .expect("a read deadline");
        let mut said = Vec::new();
        // It is reset until socat listens.
        let outcome = write!(client, "GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
            .and_then(|()| client.read_to_end(&mut said));
        let said = String::from_utf8_lossy(&said);
        if said.starts_with("HTTP/1.") && said.contains(" 200 OK") && said.ends_with("Hello\n") {
            break;
        }
        assert!(Instant::now() < deadline, "{outcome:?}: {said}");
        thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn ask_a_name_server(lab: &Lab) {
    let [listen, configure, ask] = lines("Ask a name server from a guest");
    if !is_ready(lab, "guide_ask_a_name_server") {
        return;
    }
    answer(&lab.network.as_ref().expect("a network").names);
    start(lab, listen);
    assert_eq!(run(lab, configure).bytes, 0, "{configure}");
    until(lab, ask, &ADDRESS.to_string());
}
