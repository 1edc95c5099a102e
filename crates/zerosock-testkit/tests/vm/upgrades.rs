//! Upgrades of the process that serves, under traffic, with a stock guest and a front-end that does not connect again: no
//! connection ends, and no byte is lost.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use zerosock_cli::vm::hybrid;
use zerosock_cli::vm::pattern::Pattern;
use zerosock_testkit::device::{Device, Endpoint, Program};
use zerosock_testkit::protocol::Command;

use crate::Alone;
use crate::guest_pages::{Extras, Machine};
use crate::lab::{STEP, Skipped, echo, serving, short_dir, zerosock};
use crate::restarts::{echo_once, parent, worker};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("connections_outlast_upgrades_on_6.12", || upgrades("6.12")),
    ("connections_outlast_upgrades_on_6.1", || upgrades("6.1")),
];

/// The host's port, and the guest's port that echoes.
const HOST: u32 = 7;
const ECHO: u32 = 5000;

fn count(name: &str, default: u64) -> u64 {
    let text = std::env::var(name);
    text.map_or(default, |text| text.parse().expect("a number"))
}

fn rounds() -> u64 {
    count("ZEROSOCK_UPGRADES", 5)
}

/// Connections that do nothing meanwhile.
fn idle() -> u64 {
    count("ZEROSOCK_UPGRADE_CONNECTIONS", 50)
}

/// Longer than a test takes.
pub(crate) fn limit() -> Duration {
    STEP * 2 + Duration::from_secs(10) * rounds() as u32
}

fn connect(endpoint: &Endpoint) -> UnixStream {
    let (stream, _) = hybrid::connect(&endpoint.uds, ECHO, STEP).expect("a connection");
    stream.set_read_timeout(Some(STEP)).expect("a time limit");
    stream
}

fn ping(mut stream: &UnixStream, text: [u8; 5]) {
    stream.write_all(&text).expect("a write");
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer, text);
}

/// Sends the pattern through the guest's echo until told to stop. Returns the number of bytes, all of which have come back.
fn stream(mut stream: &UnixStream, seed: u64, stop: &AtomicBool) -> u64 {
    thread::scope(|scope| {
        let sending = scope.spawn(move || {
            let mut stream = stream;
            let (mut buffer, mut pattern) = (vec![0; 1 << 16], Pattern::new(seed));
            let mut sent = 0;
            while !stop.load(Ordering::Relaxed) {
                pattern.fill(&mut buffer);
                stream.write_all(&buffer).expect("a write");
                sent += buffer.len() as u64;
            }
            stream.shutdown(Shutdown::Write).expect("a shutdown");
            sent
        });
        let (mut buffer, mut expected) = (vec![0; 1 << 16], vec![0; 1 << 16]);
        let (mut pattern, mut received) = (Pattern::new(seed), 0);
        loop {
            let bytes = stream.read(&mut buffer).expect("a read");
            if bytes == 0 {
                break;
            }
            pattern.fill(&mut expected[..bytes]);
            assert!(
                buffer[..bytes] == expected[..bytes],
                "not the bytes that were sent, after {received}"
            );
            received += bytes as u64;
        }
        assert_eq!(sending.join().expect("a writer"), received);
        received
    })
}

/// The longest of many round trips, until told to stop, since the last call of the function that is passed.
fn measure(stream: &UnixStream, stop: &AtomicBool, longest: &std::sync::Mutex<Duration>) {
    while !stop.load(Ordering::Relaxed) {
        let begin = Instant::now();
        ping(stream, *b"again");
        let mut longest = longest.lock().expect("a duration");
        *longest = begin.elapsed().max(*longest);
    }
}

fn upgrades(release: &str) -> Result<(), Skipped> {
    let dir = short_dir();
    let endpoint = Endpoint::new(dir.path(), 3);
    let program = Program {
        path: serving(),
        arguments: vec!["serve".into()],
        zerosock: zerosock().to_owned(),
    };
    let device = Device::start(&program, std::slice::from_ref(&endpoint), echo("device"));
    let device = device.expect("a device");
    let listener = hybrid::listen(&endpoint.uds, HOST).expect("a port of the host");
    let machine = Machine::boot_with(release, Some(&endpoint.vhost), Extras::default())?;
    let guest = &machine.guest.remote;
    let listening = guest.socket(Command::Listen { port: ECHO }, STEP);
    guest.start(Command::Echo {
        socket: listening.expect("a listener"),
    });
    echo_once(&endpoint);

    let idle: Vec<_> = (0..idle()).map(|_| connect(&endpoint)).collect();
    idle.iter().for_each(|stream| ping(stream, *b"first"));
    let connecting = guest.start(Command::Connect { cid: 2, port: HOST });
    let mut accepted = hybrid::accept(&listener, STEP).expect("a connection of the guest");
    let receiving = guest.start(Command::Receive {
        socket: connecting.socket(STEP).expect("a socket"),
        limit: None,
        keep: false,
        acknowledge: false,
    });
    let (bulk, measured) = (connect(&endpoint), connect(&endpoint));
    let (stop, longest) = (AtomicBool::new(false), std::sync::Mutex::default());
    let mut pauses = Vec::new();
    let mut bytes = 0;
    thread::scope(|scope| {
        let (done, is_done) = channel();
        let (bulk, stop, longest) = (&bulk, &stop, &longest);
        scope.spawn(move || done.send(stream(bulk, 1, stop)));
        scope.spawn(|| measure(&measured, stop, longest));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..rounds() {
                // Any moment will do.
                thread::sleep(Duration::from_millis(20 + round * 37 % 200));
                let before = worker(device.id()).expect("a process that serves");
                let supervisor = parent(&before.as_raw_pid().to_string());
                let supervisor = Pid::from_raw(supervisor.expect("a supervisor") as i32);
                *longest.lock().expect("a duration") = Duration::ZERO;
                kill_process(supervisor.expect("a process"), Signal::USR2).expect("a signal");
                let deadline = Instant::now() + STEP;
                while worker(device.id()).is_none_or(|now| now == before) || still_runs(before) {
                    let log = device.log.tail(20);
                    assert!(Instant::now() < deadline, "no upgrade\n{log}");
                    thread::sleep(Duration::from_millis(1));
                }
                // From new connections in both directions, too.
                echo_once(&endpoint);
                pauses.push(*longest.lock().expect("a duration"));
                let connecting = guest.start(Command::Connect { cid: 2, port: HOST });
                hybrid::accept(&listener, STEP).expect("a connection of the guest");
                connecting.socket(STEP).expect("a socket");
            }
        }));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
        bytes = is_done.recv().expect("the bytes");
    });
    let log = device.log.tail(30);
    idle.iter().for_each(|stream| ping(stream, *b"still"));
    accepted.write_all(b"still here").expect("a write");
    drop(accepted);
    let outcome = receiving
        .wait(STEP)
        .unwrap_or_else(|error| panic!("{error}\n{log}"));
    assert!(outcome.end && outcome.bytes == 10, "{outcome:?}\n{log}");
    pauses.sort();
    println!(
        "Linux {}: {} upgrades, {} MiB through the guest's echo; the longest round trip at each: median {:?}, longest {:?}",
        machine.guest.release,
        pauses.len(),
        bytes >> 20,
        pauses[pauses.len() / 2],
        pauses[pauses.len() - 1],
    );
    Ok(())
}

fn still_runs(process: Pid) -> bool {
    rustix::process::test_kill_process(process).is_ok()
}
