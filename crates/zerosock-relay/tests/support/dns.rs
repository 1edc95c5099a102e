//! A name server on 127.0.0.1 that does as a test says, over UDP and TCP.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex};
use std::thread;

const A: u16 = 1;
const CNAME: u16 = 5;
const AAAA: u16 = 28;
const TRUNCATED: u8 = 2;

/// A question.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Question {
    /// In lower case and without the dot at the end.
    pub name: String,
    pub ipv6: bool,
}

/// What the server does about a question.
pub enum Reply {
    Addresses(Vec<IpAddr>),
    /// A CNAME record, and the addresses of the other name.
    Alias(&'static str, Vec<IpAddr>),
    NoSuchName,
    ServerFailure,
    Never,
    /// The reply of the inner one; its records may be kept for a minute.
    Cacheable(Box<Reply>),
}

/// Addresses of the family that the question asks for.
pub fn addresses(question: &Question, of: &[&str]) -> Reply {
    let all = of.iter().map(|text| text.parse::<IpAddr>().unwrap());
    Reply::Addresses(all.filter(|ip| ip.is_ipv6() == question.ipv6).collect())
}

type Rule = Arc<dyn Fn(&Question) -> Reply + Send + Sync>;

/// A running server. Its threads end with the test process.
pub struct NameServer {
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<Question>>>,
}

impl NameServer {
    pub fn start(rule: impl Fn(&Question) -> Reply + Send + Sync + 'static) -> Self {
        NameServer::start_at("127.0.0.1:0", rule)
    }

    pub fn start_at(
        address: &str,
        rule: impl Fn(&Question) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let (udp, tcp) = loop {
            let udp = UdpSocket::bind(address).unwrap();
            if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()) {
                break (udp, tcp);
            }
        };
        let address = udp.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let rule: Rule = Arc::new(rule);
        let (udp_rule, udp_asked) = (rule.clone(), asked.clone());
        thread::spawn(move || serve_udp(&udp, &udp_rule, &udp_asked));
        let tcp_asked = asked.clone();
        thread::spawn(move || serve_tcp(&tcp, &rule, &tcp_asked));
        NameServer { address, asked }
    }

    /// The questions so far, in the order of arrival.
    pub fn asked(&self) -> Vec<Question> {
        self.asked.lock().unwrap().clone()
    }
}

fn serve_udp(socket: &UdpSocket, rule: &Rule, asked: &Mutex<Vec<Question>>) {
    let mut buffer = [0; 1500];
    while let Ok((length, client)) = socket.recv_from(&mut buffer) {
        let query = buffer[..length].to_vec();
        let question = question(&query);
        asked.lock().unwrap().push(question.clone());
        let reply = rule(&question);
        let Some(mut message) = message(&query, reply) else {
            continue;
        };
        if message.len() > 512 {
            // RFC 1035, 4.2.1: the client asks again over TCP.
            message.truncate(12 + query_length(&query));
            message[2] |= TRUNCATED;
            message[6..12].fill(0);
        }
        let _ = socket.send_to(&message, client);
    }
}

fn serve_tcp(listener: &TcpListener, rule: &Rule, asked: &Mutex<Vec<Question>>) {
    while let Ok((mut client, _)) = listener.accept() {
        let mut length = [0; 2];
        while client.read_exact(&mut length).is_ok() {
            let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
            client.read_exact(&mut query).unwrap();
            let question = question(&query);
            asked.lock().unwrap().push(question.clone());
            if let Some(message) = message(&query, rule(&question)) {
                client
                    .write_all(&(message.len() as u16).to_be_bytes())
                    .unwrap();
                client.write_all(&message).unwrap();
            }
        }
    }
}

/// Bytes of the question behind the header.
fn query_length(query: &[u8]) -> usize {
    let mut at = 12;
    while query[at] != 0 {
        at += 1 + usize::from(query[at]);
    }
    at + 5 - 12
}

fn question(query: &[u8]) -> Question {
    let mut labels = Vec::new();
    let mut at = 12;
    while query[at] != 0 {
        let length = usize::from(query[at]);
        labels.push(String::from_utf8(query[at + 1..][..length].to_vec()).unwrap());
        at += 1 + length;
    }
    let kind = u16::from_be_bytes([query[at + 1], query[at + 2]]);
    assert!(
        kind == A || kind == AAAA,
        "a question for records of type {kind}"
    );
    Question {
        name: labels.join(".").to_lowercase(),
        ipv6: kind == AAAA,
    }
}

/// The reply to a query; None for none.
fn message(query: &[u8], reply: Reply) -> Option<Vec<u8>> {
    let asked = &query[12..][..query_length(query)];
    // Compressed: the name at byte 12.
    let owner = vec![0xc0, 12];
    let (code, records) = match reply {
        Reply::Addresses(addresses) => (
            0,
            addresses.into_iter().map(|ip| record(&owner, ip)).collect(),
        ),
        Reply::Alias(target, addresses) => {
            let target = encoded(target);
            let mut records = vec![with_data(&owner, CNAME, &target)];
            records.extend(addresses.into_iter().map(|ip| record(&target, ip)));
            (0, records)
        }
        Reply::NoSuchName => (3, Vec::new()),
        Reply::ServerFailure => (2, Vec::new()),
        Reply::Never => return None,
        Reply::Cacheable(reply) => {
            let mut message = message(query, *reply)?;
            // Behind name, type and class of the first record.
            let ttl = 12 + asked.len() + 6;
            if let Some(ttl) = message.get_mut(ttl..ttl + 4) {
                ttl.copy_from_slice(&60_u32.to_be_bytes());
            }
            return Some(message);
        }
    };
    // A response with recursion desired and available.
    let mut message = vec![query[0], query[1], 0x81, 0x80 | code, 0, 1];
    message.extend((records.len() as u16).to_be_bytes());
    message.extend([0; 4]);
    message.extend(asked);
    message.extend(records.concat());
    Some(message)
}

fn record(owner: &[u8], address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => with_data(owner, A, &Ipv4Addr::octets(&address)),
        IpAddr::V6(address) => with_data(owner, AAAA, &Ipv6Addr::octets(&address)),
    }
}

/// A record of class IN that may not be kept.
fn with_data(owner: &[u8], kind: u16, data: &[u8]) -> Vec<u8> {
    let mut record = owner.to_vec();
    record.extend(kind.to_be_bytes());
    record.extend([0, 1, 0, 0, 0, 0]);
    record.extend((data.len() as u16).to_be_bytes());
    record.extend(data);
    record
}

fn encoded(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.') {
        bytes.push(label.len() as u8);
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes
}
