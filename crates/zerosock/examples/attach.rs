//! Processes that find each other by name.
//!
//! With the attach socket of a running `zerosock serve --attach-socket PATH`:
//!
//! ```sh
//! cargo run --example attach -- PATH serve     # in one terminal
//! cargo run --example attach -- PATH ask       # in another
//! ```
//!
//! Without, it starts a daemon and does both by itself.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::thread;

use zerosock::Port;
use zerosock::attach::{self, AttachConfig};
use zerosock::daemon::{Daemon, DaemonConfig};
use zerosock::vsock::{Endpoint, Stream, Wait};

type Error = Box<dyn std::error::Error + Send + Sync>;

const PORT: Port = Port::new(5432);

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args[..] {
        [path, what] if what == "serve" => loop {
            serve(&open(path.as_ref(), "db")?)?;
        },
        [path, what] if what == "ask" => ask(&open(path.as_ref(), "web")?),
        [] => {
            let dir = tempfile::tempdir()?;
            let path = dir.path().join("attach.sock");
            let daemon = Daemon::start(DaemonConfig {
                attach: Some(AttachConfig::new(attach::listen(&path)?)),
                ..DaemonConfig::default()
            })?;
            let db = open(&path, "db")?;
            let serving = thread::spawn(move || serve(&db));
            ask(&open(&path, "web")?)?;
            serving.join().expect("the server does not panic")?;
            daemon.shutdown();
            Ok(())
        }
        _ => Err("usage: attach [PATH serve|ask]".into()),
    }
}

/// Attaches under a name. Its calls spin for an adaptive time, then sleep.
fn open(path: &Path, name: &str) -> Result<Endpoint, Error> {
    let endpoint = Endpoint::builder()
        .name(name)
        .wait(Wait::ADAPTIVE)
        .attach(path)?;
    println!("{name} is CID {}", endpoint.cid());
    Ok(endpoint)
}

/// Answers one client, line by line.
fn serve(endpoint: &Endpoint) -> Result<(), Error> {
    let (stream, client) = endpoint.listen(PORT, 16)?.accept()?;
    println!("db: {client} asks");
    answer(stream)
}

fn answer(stream: Stream) -> Result<(), Error> {
    for line in BufReader::new(&stream).lines() {
        writeln!(&stream, "{}", line?.chars().rev().collect::<String>())?;
    }
    Ok(())
}

/// Queries the process called `db`.
fn ask(endpoint: &Endpoint) -> Result<(), Error> {
    // It may not listen yet.
    let stream = loop {
        match endpoint.connect_name("db", PORT) {
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                thread::yield_now();
            }
            other => break other?,
        }
    };
    let mut answers = BufReader::new(&stream).lines();
    for question in ["stressed", "drawer"] {
        writeln!(&stream, "{question}")?;
        let answer = answers.next().ok_or("no answer")??;
        println!("web: {question} is {answer}");
        assert!(["desserts", "reward"].contains(&&*answer));
    }
    Ok(())
}
