//! Guest endpoints as users have them, with stock guests: `serve --guest-endpoints` on the host, `zerosock guest` in the guest,
//! and programs of the guest without privileges, `zerosock nc`, which attach there as they would on a host. Bytes cross both
//! ways unchanged, and the pages are free again when the programs have ended, or were killed under traffic. The pages lie
//! above 4 GiB. `zerosock perf` runs between such a program and a process of the host, both ways, and receives in place.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use zerosock_cli::vm::hybrid;
use zerosock_cli::vm::pattern::sha256;
use zerosock_testkit::device::{Device, Endpoint, Program};
use zerosock_testkit::guest::NAME;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::remote::Pending;

use crate::Alone;
use crate::guest_direct;
use crate::guest_pages::Machine;
use crate::lab::{STEP, Skipped, echo, short_dir, zerosock};
use crate::scenarios::perf::{Here, MEGABYTES, RECEIVED};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("a_program_streams_from_its_pages_on_6.12", || {
        stream("6.12")
    }),
    ("a_program_streams_from_its_pages_on_6.1", || stream("6.1")),
];

pub(crate) const KEY: &str = "0123456789abcdef0123456789abcdef";
pub(crate) const PORT: u32 = 4321;
/// Huge pages of the guest: enough for [`CLIENTS`] endpoints.
pub(crate) const PAGES: u64 = 48;
const BYTES: usize = 16 << 20;
/// Clients at once, and the MiB of each.
const CLIENTS: usize = 4;
const PART: usize = 1;

/// A daemon that lets its VM have endpoints.
pub(crate) fn start_daemon(endpoint: &Endpoint, key: &Path, attach: &Path) -> Device {
    let path = |path: &Path| path.as_os_str().to_owned();
    let mut arguments: Vec<_> = ["serve", "--guest-cid", "3", "--socket"]
        .map(Into::into)
        .into();
    arguments.extend([
        path(&endpoint.vhost),
        "--uds-path".into(),
        path(&endpoint.uds),
    ]);
    arguments.extend(["--guest-endpoints".into(), path(key)]);
    arguments.extend(["--attach-socket".into(), path(attach)]);
    let program = Program {
        path: zerosock().to_owned(),
        arguments,
        zerosock: zerosock().to_owned(),
    };
    let device = Device::start(&program, &[], echo("device")).expect("a device");
    let deadline = Instant::now() + STEP;
    while !endpoint.vhost.exists() {
        let log = device.log.tail(20);
        assert!(
            Instant::now() < deadline,
            "the daemon does not listen:\n{log}"
        );
        thread::sleep(Duration::from_millis(10));
    }
    device
}

/// The guest's shell runs a client without privileges.
fn nc(machine: &Machine, rest: &str) -> Pending {
    let unprivileged = format!("/bin/zerosock {NAME} unprivileged --");
    let script =
        format!("{unprivileged} /bin/zerosock nc attach:/run/zerosock/attach.sock:2:{PORT} {rest}");
    let argv = ["/bin/busybox", "sh", "-c", &script].map(str::to_owned);
    machine
        .guest
        .remote
        .start(Command::Run { argv: argv.into() })
}

/// Sends everything back, and returns it.
fn serve_echo(mut socket: UnixStream) -> Vec<u8> {
    socket.set_read_timeout(Some(STEP)).expect("a time limit");
    let (mut all, mut bytes) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        match socket.read(&mut bytes).expect("bytes of the guest") {
            0 => return all,
            len => {
                socket.write_all(&bytes[..len]).expect("a receiver");
                all.extend(&bytes[..len]);
            }
        }
    }
}

fn stream(release: &str) -> Result<(), Skipped> {
    let dir = short_dir();
    let endpoint = Endpoint::new(dir.path(), 3);
    let key: PathBuf = dir.path().join("key");
    std::fs::write(&key, KEY).expect("a file");
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&key, mode).expect("a mode");
    let listener = hybrid::listen(&endpoint.uds, PORT).expect("a port of the host");
    let attach = dir.path().join("attach");
    let device = start_daemon(&endpoint, &key, &attach);
    let machine = Machine::boot_large(release, &endpoint.vhost)?;
    let setup = format!(
        "echo {PAGES} > /proc/sys/vm/nr_hugepages; printf %s {KEY} > /key; chmod 600 /key; \
         dd if=/dev/urandom of=/tmp/sent bs=1M count={} 2>/dev/null; chmod 644 /tmp/sent",
        BYTES >> 20
    );
    assert_eq!(machine.shell(&setup), "");
    assert_above_4_gib(&machine);
    let agent = "/bin/zerosock guest --key /key --attach-uid 65534 --socket-mode 0666";
    let argv = agent.split(' ').map(str::to_owned).collect();
    let started = machine.guest.remote.run(Command::Start { argv }, STEP);
    started.expect("an agent");
    let waiting = "while ! test -S /run/zerosock/attach.sock; do sleep 0.1; done";
    assert_eq!(machine.shell(waiting), "");

    let client = nc(&machine, "< /tmp/sent > /tmp/back");
    let socket = match hybrid::accept(&listener, STEP) {
        Ok(socket) => socket,
        Err(error) => panic!(
            "{error}: {:?}\n{}\n{}",
            client.wait(Duration::from_secs(1)),
            machine.guest.console.tail(20),
            device.log.tail(20)
        ),
    };
    let received = serve_echo(socket);
    let outcome = client.wait(STEP).expect("an outcome");
    assert_eq!((outcome.bytes, outcome.text.as_deref()), (0, Some("")));
    assert_eq!(received.len(), BYTES);
    let sums = machine.shell("cd /tmp; sha256sum sent back");
    let sum = sha256(&received);
    assert_eq!(sums, format!("{sum}  sent\n{sum}  back\n"));
    machine.take_in_time(PAGES);

    several_at_once(&machine, &listener);
    killed_under_traffic(&machine, &listener);
    perf(&machine, &attach);
    guest_direct::run(&machine, &listener, &device);
    Ok(())
}

fn assert_above_4_gib(machine: &Machine) {
    let text = machine.pages(&format!("find --pages {PAGES}"));
    let addresses = text.split("addr: ").skip(1);
    let addresses: Vec<u64> = addresses
        .map(|rest| rest.split(',').next().and_then(|addr| addr.parse().ok()))
        .map(|addr| addr.unwrap_or_else(|| panic!("{text}")))
        .collect();
    assert!(!addresses.is_empty(), "{text}");
    assert!(addresses.iter().all(|&addr| addr >= 4 << 30), "{text}");
}

/// Programs that are attached at the same time get their own bytes back.
fn several_at_once(machine: &Machine, listener: &UnixListener) {
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (skip, sent) = (number * PART, format!("/tmp/sent.{number}"));
            let copy =
                format!("dd if=/tmp/sent of={sent} bs=1M skip={skip} count={PART} 2>/dev/null");
            assert_eq!(machine.shell(&copy), "");
            nc(machine, &format!("< {sent} > {sent}.back"))
        })
        .collect();
    // All are attached before one is served.
    let sockets: Vec<_> = clients
        .iter()
        .map(|_| {
            let accepted = hybrid::accept(listener, STEP);
            accepted.unwrap_or_else(|error| panic!("{error}: {}", machine.guest.console.tail(20)))
        })
        .collect();
    let echoes: Vec<_> = sockets
        .into_iter()
        .map(|socket| thread::spawn(move || serve_echo(socket).len()))
        .collect();
    for client in clients {
        let outcome = client.wait(STEP).expect("an outcome");
        assert_eq!((outcome.bytes, outcome.text.as_deref()), (0, Some("")));
    }
    for echo in echoes {
        assert_eq!(echo.join().expect("all bytes"), PART << 20);
    }
    let compare = "for sent in /tmp/sent.?; do cmp $sent $sent.back; done";
    assert_eq!(machine.shell(compare), "");
    machine.take_in_time(PAGES);
}

/// `zerosock perf` in the guest and on the host. The receiver checks every byte where it lies. On a busy machine many are
/// copied out, after 20 ms: less in flight makes them fewer.
fn perf(machine: &Machine, attach: &Path) {
    let there = |arguments: &str| {
        let program = format!("/bin/zerosock {NAME} unprivileged -- /bin/zerosock perf");
        format!("{program} {arguments} -p {PORT} --attach /run/zerosock/attach.sock")
    };
    let server = format!("-s -m {MEGABYTES}");
    let client = |cid: &str, mode| format!("-c {cid} -z {mode} -b 16 -v 65536 --verify");
    let has_received = |said: &str| {
        let in_place = said.split("in place: ").nth(1);
        let in_place = in_place.and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
        said.contains(RECEIVED) && in_place.is_some_and(|bytes| bytes > 0)
    };
    for mode in ["y", "u"] {
        let on_host = format!("{server} -p {PORT}");
        let mut here = Here::start(&on_host, ["--attach"], attach);
        let cid = here.wait_for("Listen at CID ");
        let cid = cid.split(',').next().expect("a CID");
        here.wait_for("TX buffer");
        let said = machine.shell(&there(&client(cid, mode)));
        assert!(has_received(&said), "to the guest, {mode}: {said}");
        let (well, said) = here.finish();
        assert!(well && said.contains("tx rate: "), "{said}");
        machine.take_in_time(PAGES);

        // The server's output is in a file, because its CID is in it.
        let served = format!("/tmp/served-{mode}");
        let wait_for = |text| format!("until grep -qs '{text}' {served}; do sleep 0.1; done");
        let start = format!("{} > {served} 2>&1", there(&server));
        let started = machine.shell(&format!(
            "{start} & {}; cat {served}",
            wait_for("TX buffer")
        ));
        let cid = started.split("Listen at CID ").nth(1);
        let cid = cid.and_then(|rest| rest.split(',').next());
        let cid = cid.unwrap_or_else(|| panic!("no CID: {started}"));
        let on_host = format!("{} -p {PORT}", client(cid, mode));
        let (well, said) = Here::start(&on_host, ["--attach"], attach).finish();
        assert!(well && has_received(&said), "to the host, {mode}: {said}");
        assert_eq!(machine.shell(&wait_for("tx rate: ")), "");
        machine.take_in_time(PAGES);
    }
}

/// A program gets SIGKILL while bytes cross both ways.
fn killed_under_traffic(machine: &Machine, listener: &UnixListener) {
    let client = nc(machine, "< /dev/zero > /dev/null");
    let mut socket = hybrid::accept(listener, STEP).expect("a connection");
    socket.set_read_timeout(Some(STEP)).expect("a time limit");
    let count = Arc::new(AtomicU64::new(0));
    let (counted, mut back) = (count.clone(), socket.try_clone().expect("a descriptor"));
    let sender = thread::spawn(move || while back.write_all(&[0; 16 << 10]).is_ok() {});
    let receiver = thread::spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        loop {
            // A reset, or an end.
            match socket.read(&mut bytes) {
                Ok(0) | Err(_) => return,
                Ok(len) => counted.fetch_add(len as u64, Ordering::Relaxed),
            };
        }
    });
    let deadline = Instant::now() + STEP;
    while count.load(Ordering::Relaxed) < 8 << 20 {
        assert!(Instant::now() < deadline, "no traffic");
        thread::sleep(Duration::from_millis(1));
    }
    let kill = "for p in /proc/[0-9]*; do grep -q 'zero.*n[c]' $p/cmdline && kill -9 ${p#/proc/}; done 2>/dev/null";
    machine.shell(kill);
    client.wait(STEP).expect("its end");
    receiver.join().expect("an end");
    sender.join().expect("an end");
    machine.take_in_time(PAGES);
}
