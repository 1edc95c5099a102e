//! The worker processes of the scenarios.

use std::convert::Infallible;
use std::fs::{self, File, OpenOptions};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::process::exit;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use signal_hook::consts::{SIGHUP, SIGTERM, SIGUSR1, SIGUSR2};
use zerosock_supervisor::{
    Batch, Client, Entry, Error, MAX_BYTES, MAX_DATAGRAM, MAX_FDS, MAX_OPERATIONS,
};

pub(crate) fn run(scenario: &str) -> ! {
    if scenario == "hasty" && dir().join("filled").exists() && !dir().join("hasty").exists() {
        hasty();
    }
    let (client, entries) = Client::take().unwrap();
    let result = match scenario {
        "count" => count(&client, &entries),
        "hostile" => hostile(&client, &entries),
        "full" => full(&client, &entries),
        "hang" | "hang_early" => hang(scenario, &client, &entries),
        "deaths" => die(&client, &entries),
        "misconfigured" => exit(3),
        "killed_early" => {
            let id = rustix::process::getpid();
            rustix::process::kill_process(id, rustix::process::Signal::KILL).unwrap();
            wait()
        }
        "signals" => signals(&client),
        "hasty" => fill(&client, &entries),
        "write" => write(&client),
        "states" => states(&client),
        "upgrade" => upgrade(&client, &entries),
        "idle" => {
            report(&std::process::id().to_string());
            wait()
        }
        _ => panic!("no scenario {scenario}"),
    };
    let Err(error) = result;
    panic!("{error}");
}

fn dir() -> PathBuf {
    std::env::var_os("DIR").unwrap().into()
}

fn report(text: &str) {
    let socket = UnixDatagram::unbound().unwrap();
    socket
        .send_to(text.as_bytes(), dir().join("reports"))
        .unwrap();
}

fn report_entries(entries: &[Entry]) {
    let text = |entry: &Entry| format!("{}={}", entry.key, String::from_utf8_lossy(&entry.bytes));
    report(&entries.iter().map(text).collect::<Vec<_>>().join(" "));
}

/// Waits to be killed, but not for ever, in case a test has failed.
fn wait() -> ! {
    std::thread::sleep(Duration::from_secs(240));
    exit(99);
}

/// Sets two entries, by different operations, to the same number, and one with a file, for ever.
fn count(client: &Client, entries: &[Entry]) -> Result<Infallible, Error> {
    let number = |key: &str| {
        let entry = entries.iter().find(|entry| entry.key == key)?;
        let mut content = String::new();
        if let [file] = &entry.fds[..] {
            let mut file = File::from(file.try_clone().unwrap());
            std::io::Seek::rewind(&mut file).unwrap();
            file.read_to_string(&mut content).unwrap();
            assert_eq!(content.as_bytes(), entry.bytes, "the file of another batch");
        }
        String::from_utf8(entry.bytes.clone())
            .unwrap()
            .parse::<u64>()
            .ok()
    };
    let (a, b) = (number("n/a").unwrap_or(0), number("n/b").unwrap_or(0));
    assert!(
        !entries.iter().any(|entry| entry.key == "pending"),
        "half of a batch"
    );
    client.notify("READY=1")?;
    let mut sent = OpenOptions::new()
        .create(true)
        .append(true)
        .open(dir().join("sent"))?;
    report(&format!(
        "started {} {a} {b} {}",
        std::process::id(),
        sent.metadata()?.len()
    ));
    for number in a + 1.. {
        let text = number.to_string();
        let mut file = File::from(memfd_create("n", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(text.as_bytes())?;
        let fds = [file.as_fd()];
        let batch = Batch::default()
            .put("pending", text.as_bytes(), &fds)
            .remove("n/b");
        let batch = batch
            .put("n/a", text.as_bytes(), &[])
            .rename("pending", "n/b");
        client.send(&batch)?;
        sent.write_all(b".")?;
        if dir().join("pause").exists() {
            report("paused");
            while dir().join("pause").exists() {
                std::thread::yield_now();
            }
        }
    }
    unreachable!();
}

/// One operation in its wire form.
fn operation(kind: u8, fds: u8, key: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![kind, fds];
    out.extend((key.len() as u16).to_le_bytes());
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(key);
    out.extend(bytes);
    out
}

fn message(operations: &[Vec<u8>]) -> Vec<u8> {
    let count = (operations.len() as u16).to_le_bytes();
    [&[1, 0][..], &count, &operations.concat()].concat()
}

/// Messages that break a rule, with a number of descriptors. Where they can, they put `bad` first.
pub(crate) fn hostile_messages() -> Vec<(Vec<u8>, usize)> {
    let bad = || operation(1, 0, b"bad", b"");
    let with_bad =
        |kind, fds, key: &[u8], bytes: &[u8]| message(&[bad(), operation(kind, fds, key, bytes)]);
    let random: Vec<u8> = (0..500_u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let mut truncated = message(&[bad(), bad()]);
    truncated.pop();
    // Without its last byte it would be valid.
    let parts = [
        [MAX_BYTES; 7].as_slice(),
        &[MAX_DATAGRAM - 4 - 7 * (9 + MAX_BYTES) - 9],
    ]
    .concat();
    let parts: Vec<_> = parts
        .iter()
        .map(|length| operation(1, 0, b"k", &vec![0; *length]))
        .collect();
    let mut too_long = message(&parts);
    assert_eq!(too_long.len(), MAX_DATAGRAM);
    too_long.push(0);
    vec![
        (random, 0),
        (vec![1], 0),
        (vec![9, 0, 0, 0], 0),
        (truncated, 0),
        ([message(&[bad()]), vec![0]].concat(), 0),
        (too_long, 0),
        (with_bad(99, 0, b"", b""), 0),
        (with_bad(1, 0, b"big", &vec![0; MAX_BYTES + 1]), 0),
        (with_bad(1, 0, b"not printable\n", b""), 0),
        (with_bad(1, 0, b"", b""), 0),
        (message(&vec![bad(); MAX_OPERATIONS + 1]), 0),
        (message(&[bad()]), 1),
        (with_bad(1, 2, b"fds", b""), 1),
        (with_bad(1, 100, b"fds", b""), 100),
        (with_bad(1, MAX_FDS as u8 + 1, b"fds", b""), MAX_FDS + 1),
        (message(&[operation(5, 0, b"", b"")]), 3),
        (message(&[operation(6, 0, b"", b"MAINPID=1")]), 0),
        (message(&[operation(8, 0, b"", &[0; 24])]), 0),
        (with_bad(5, 0, b"", b""), 0),
        (with_bad(3, 0, b"unknown", b"bad"), 0),
        (with_bad(4, 0, b"unknown", b""), 0),
        (message(&[]), 2),
    ]
}

/// Sends bytes past the client, with copies of a descriptor.
fn send_raw(socket: impl AsFd, bytes: &[u8], fds: usize) {
    let file = memfd_create("raw", MemfdFlags::CLOEXEC).unwrap();
    let fds: Vec<BorrowedFd<'_>> = vec![file.as_fd(); fds];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .unwrap();
}

/// Sends one hostile message a process; the entry `turn` counts.
fn hostile(client: &Client, entries: &[Entry]) -> Result<Infallible, Error> {
    report_entries(entries);
    let turn = entries.iter().find(|entry| entry.key == "turn");
    let turn = turn.map_or(0, |entry| {
        String::from_utf8_lossy(&entry.bytes).parse().unwrap()
    });
    client.notify("READY=1")?;
    let Some((bytes, fds)) = hostile_messages().into_iter().nth(turn) else {
        client.stopping()?;
        exit(7);
    };
    client.send(&Batch::default().put("turn", (turn + 1).to_string().as_bytes(), &[]))?;
    send_raw(client, &bytes, fds);
    // Nothing after it counts.
    let _ = client.send(&Batch::default().put("late", b"", &[]));
    wait()
}

fn full(client: &Client, entries: &[Entry]) -> Result<Infallible, Error> {
    report_entries(entries);
    if !entries.is_empty() {
        client.stopping()?;
        exit(0);
    }
    client.notify("READY=1")?;
    client.send(&Batch::default().put("a", b"1", &[]).put("b", b"2", &[]))?;
    let batch = Batch::default()
        .remove("a")
        .put("c", b"", &[])
        .put("d", b"", &[]);
    let batch = batch.put("e", b"", &[]).put("f", b"", &[]);
    assert!(matches!(client.send(&batch), Err(Error::Full)));
    report("refused");
    let put = |key: &[u8]| operation(1, 0, key, b"");
    let raw = [
        operation(2, 0, b"a", b""),
        put(b"c"),
        put(b"d"),
        put(b"e"),
        put(b"f"),
    ];
    send_raw(client, &message(&raw), 0);
    wait()
}

fn hang(scenario: &str, client: &Client, entries: &[Entry]) -> Result<Infallible, Error> {
    if !entries.is_empty() {
        client.stopping()?;
        report_entries(entries);
        exit(0);
    }
    client.send(&Batch::default().put("a", b"1", &[]))?;
    client.notify("READY=1")?;
    if scenario == "hang" {
        client.alive()?;
    }
    report_entries(entries);
    wait()
}

fn die(client: &Client, entries: &[Entry]) -> Result<Infallible, Error> {
    report_entries(entries);
    let starts = dir().join("starts");
    let count = fs::read(&starts).map_or(0, |starts| starts.len());
    fs::write(&starts, vec![b'.'; count + 1])?;
    match count {
        0 => {
            client.send(
                &Batch::default()
                    .put("listen/a", b"1", &[])
                    .put("state", b"2", &[]),
            )?;
            client.notify("READY=1")?;
        }
        5 => {
            client.stopping()?;
            exit(5);
        }
        _ => {}
    }
    std::process::abort();
}

fn signals(client: &Client) -> Result<Infallible, Error> {
    let (mut ours, theirs) = UnixStream::pair()?;
    for signal in [SIGHUP, SIGUSR1, SIGTERM] {
        let caught = std::sync::Arc::<std::sync::atomic::AtomicUsize>::default();
        signal_hook::flag::register_usize(signal, caught.clone(), 1)?;
        signal_hook::low_level::pipe::register(signal, theirs.try_clone()?)?;
        std::thread::spawn(move || {
            let name = signal_hook::low_level::signal_name(signal).unwrap();
            while caught.swap(0, std::sync::atomic::Ordering::SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            report(name);
            if signal == SIGTERM {
                exit(11);
            }
        });
    }
    client.notify("READY=1")?;
    report("ready");
    loop {
        let _ = ours.read(&mut [0; 8]);
    }
}

/// Counts its predecessors in an entry, and takes over as the file `next` says.
fn upgrade(client: &Client, entries: &[Entry]) -> Result<Infallible, Error> {
    let (mut ours, theirs) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(SIGUSR2, theirs)?;
    report_entries(entries);
    let takes_over = entries.iter().any(|entry| entry.key == "handover/state");
    if takes_over {
        match fs::read_to_string(dir().join("next"))?.as_str() {
            "dies" => exit(1),
            "hangs" => wait(),
            "breaks a rule" => {
                client.alive().and(client.stopping())?;
                wait()
            }
            _ => {}
        }
    }
    client.take_over()?;
    let count = entries.iter().filter(|entry| entry.key.starts_with("n/"));
    let own = format!("n/{}", count.count());
    client.send(&Batch::default().put(&own, b"", &[]))?;
    client.notify("READY=1")?;
    report(&format!("serves {}", std::process::id()));
    loop {
        let _ = ours.read(&mut [0; 8]);
        let file = File::from(memfd_create("state", MemfdFlags::CLOEXEC).unwrap());
        let state = Batch::default().put("handover/state", b"1", &[file.as_fd()]);
        client.send(&state)?;
        if fs::read_to_string(dir().join("next"))? == "dies meanwhile" {
            std::process::abort();
        }
        client.hand_over()?;
        client.send(&Batch::default().remove("handover"))?;
        report("goes on");
    }
}

fn fill(client: &Client, entries: &[Entry]) -> Result<Infallible, Error> {
    let Some(last) = entries.last() else {
        for number in 0..500 {
            let key = format!("entry/{number}");
            client.send(&Batch::default().put(&key, &[0; 1024], &[]))?;
        }
        client.notify("READY=1")?;
        fs::write(dir().join("filled"), "")?;
        report("filled");
        exit(1);
    };
    report(&format!("{} entries and {}", entries.len() - 1, last.key));
    client.stopping()?;
    exit(0);
}

/// Sends a batch without reading an entry, and ends.
fn hasty() -> ! {
    fs::write(dir().join("hasty"), "").unwrap();
    send_raw(
        std::io::stdin(),
        &message(&[operation(1, 0, b"hasty", b"")]),
        0,
    );
    exit(1);
}

fn write(client: &Client) -> Result<Infallible, Error> {
    client.notify("READY=1")?;
    let (a, mut b) = UnixStream::pair()?;
    b.set_read_timeout(Some(Duration::from_secs(60)))?;
    client.send(
        &Batch::default()
            .put("pending", b"", &[a.as_fd()])
            .write("pending", b"one"),
    )?;
    client.send(&Batch::default().rename("pending", "s").write("s", b"two"))?;
    let mut read = [0; 6];
    b.read_exact(&mut read)?;
    assert_eq!(&read, b"onetwo");

    // No Unix stream socket: nothing happens.
    let file = memfd_create("f", MemfdFlags::CLOEXEC).unwrap();
    let other = UnixDatagram::unbound()?;
    let batch = Batch::default()
        .put("f", b"", &[file.as_fd()])
        .put("d", b"", &[other.as_fd()]);
    client.send(
        &batch
            .put("empty", b"", &[])
            .write("f", b"x")
            .write("d", b"x")
            .write("empty", b"x"),
    )?;
    assert_eq!(rustix::fs::fstat(&file).unwrap().st_size, 0);

    // A full socket is shut down.
    a.set_nonblocking(true)?;
    let mut filled = 0;
    while let Ok(written) = (&a).write(&[0; 4096]) {
        filled += written;
    }
    client.send(&Batch::default().write("s", b"more"))?;
    let mut fds = [PollFd::new(&a, PollFlags::empty())];
    poll(
        &mut fds,
        Some(&Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        }),
    )
    .unwrap();
    assert!(
        fds[0].revents().contains(PollFlags::HUP),
        "the socket is not shut down"
    );
    let mut rest = Vec::new();
    b.read_to_end(&mut rest)?;
    assert_eq!(rest.len(), filled);
    report("written");
    client.stopping()?;
    exit(0);
}

fn states(client: &Client) -> Result<Infallible, Error> {
    let has = |name| {
        if std::env::var_os(name).is_some() {
            "has"
        } else {
            "no"
        }
    };
    let names = ["NOTIFY_SOCKET", "WATCHDOG_USEC"];
    report(&names.map(|name| format!("{} {name}", has(name))).join(", "));
    client.notify("READY=1\nSTATUS=up")?;
    wait()
}
