//! Output of the two sides.
//!
//! "1) In server mode it prints number of sec spent for whole tx loop. 2) In client mode it prints
//! several values": whole rx loop, time in dequeue calls, wake-ups (not when polling), average time
//! of a dequeue. zerosock adds the rate, and the bytes in place and copied.

use std::io;
use std::time::Duration;

use serde_json::{Map, Value, json};
use zerosock::Address;
use zerosock::vsock::EndpointStats;

use super::receive::Counted;
use super::settings::{Client, Mode, Output, Server};
use crate::nc::connect::REFUSED_BY_PEER;

/// Prints that the server is ready.
pub(super) fn server_begins(server: &Server, buffer: usize, cid: u32) -> String {
    let Server { port, bytes } = server;
    format!(
        "Run as server\nListen at CID {cid}, port {port}\nSend {bytes} bytes\nTX buffer {buffer} bytes"
    )
}

/// The figures of one side, as text and as JSON.
pub(super) struct Figures {
    text: String,
    json: Value,
}

impl Figures {
    /// Prints them on standard output.
    pub(super) fn print(&self, output: Output) {
        match output {
            Output::Text => println!("{}", self.text),
            Output::Json => println!("{}", self.json),
        }
    }
}

impl Output {
    /// Prints what is said before the transfer: standard output of JSON has the figures only.
    pub(super) fn begin(self, text: &str) {
        match self {
            Output::Text => println!("{text}"),
            Output::Json => eprintln!("{text}"),
        }
    }
}

pub(super) fn server(bytes: u64, took: Duration) -> Figures {
    let (seconds, rate) = (took.as_secs_f64(), rate(bytes, took));
    Figures {
        text: format!("tx loop: {seconds:.6} sec\ntx rate: {rate:.3} Gbit/s"),
        json: json!({
            "role": "server",
            "bytes": bytes,
            "seconds": seconds,
            "gbit_per_second": rate,
        }),
    }
}

pub(super) fn client_begins(client: &Client, buffer: usize) -> String {
    let Client {
        peer,
        mode,
        low_water,
        credit,
        ..
    } = client;
    let mode = match mode {
        Mode::Copy => "copy",
        Mode::InPlace => "zerocopy",
        Mode::InPlacePolling => "zerocopy, user polling",
    };
    format!(
        "Run as client: {mode}\nConnect to CID {}, port {}\nRX buffer {buffer} bytes\n\
         SO_RCVLOWAT {low_water} bytes\nPeer credit {credit} bytes",
        peer.cid, peer.port
    )
}

/// `stats`: of an endpoint, which counts bytes in place and copied.
pub(super) fn client(mode: Mode, counted: &Counted, stats: Option<EndpointStats>) -> Figures {
    let Counted {
        bytes,
        total,
        dequeue,
        dequeues,
    } = *counted;
    let calls = match mode {
        Mode::Copy => "'read()'",
        Mode::InPlace | Mode::InPlacePolling => "'fill()' + 'release()'",
    };
    let average = dequeue.as_nanos() / u128::from(dequeues.max(1));
    let mut json = Map::new();
    let mut add = |key: &str, value: Value| json.insert(key.to_owned(), value);
    add("role", "client".into());
    add("bytes", bytes.into());
    add("seconds", total.as_secs_f64().into());
    add("gbit_per_second", rate(bytes, total).into());
    add("dequeue_seconds", dequeue.as_secs_f64().into());
    add("dequeues", dequeues.into());
    add("average_dequeue_ns", (average as u64).into());
    let mut lines = vec![
        format!("received: {bytes} bytes"),
        format!("rx loop: {:.6} sec", total.as_secs_f64()),
        format!("rx rate: {:.3} Gbit/s", rate(bytes, total)),
        format!("total in {calls}: {:.6} sec", dequeue.as_secs_f64()),
    ];
    if mode != Mode::InPlacePolling {
        lines.push(format!("POLLIN wake-ups: {dequeues}"));
    }
    lines.push(format!("average in {calls}: {average} ns"));
    if let Some(stats) = stats {
        add("in_place_bytes", stats.received_in_place.into());
        add("copied_out_bytes", stats.copied_out.into());
        add("copied_aside_bytes", stats.copied_aside.into());
        lines.push(format!(
            "in place: {} bytes; copied out: {}; copied aside: {}",
            stats.received_in_place, stats.copied_out, stats.copied_aside
        ));
    }
    Figures {
        text: lines.join("\n"),
        json: Value::Object(json),
    }
}

/// The error of a client that cannot connect, with the address.
pub(super) fn not_connected(peer: Address, error: &io::Error) -> io::Error {
    let reasons = match error.kind() {
        io::ErrorKind::ConnectionReset => format!(" ({REFUSED_BY_PEER})"),
        _ => String::new(),
    };
    let text = format!(
        "connecting to CID {}, port {}: {error}{reasons}",
        peer.cid, peer.port
    );
    io::Error::new(error.kind(), text)
}

/// The error of a client whose transfer has ended early. Its own endpoint may have reset the connection.
pub(super) fn interrupted(error: io::Error, stats: EndpointStats) -> io::Error {
    let copies = stats.copied_aside;
    if error.kind() != io::ErrorKind::ConnectionReset || copies == 0 {
        return error;
    }
    let text = format!(
        "{error}, or this endpoint has: {copies} bytes were not read in time and became copies, which are limited; \
         a lower -v has fewer bytes unread"
    );
    io::Error::new(error.kind(), text)
}

fn rate(bytes: u64, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 {
        bytes as f64 * 8.0 / seconds / 1e9
    } else {
        0.0
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
