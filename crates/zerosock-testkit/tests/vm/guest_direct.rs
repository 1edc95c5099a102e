//! A part of [`guest_endpoint`](crate::guest_endpoint): a privileged program of the guest without `zerosock guest`. It streams
//! both ways in place. It gets SIGKILL while the daemon stands still with bytes for it: neither its file nor the keeper gives
//! a page to the guest's kernel before the daemon has ended the endpoint, and the next program gets exactly these pages.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use zerosock_cli::vm::hybrid;
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::device::Device;
use zerosock_testkit::guest::NAME;
use zerosock_testkit::guest::leases::SEED;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::remote::Pending;

use crate::guest_endpoint::{PAGES, PORT};
use crate::guest_pages::Machine;
use crate::lab::{STEP, deadlines};

/// Bytes each way.
const BYTES: usize = 2 << 20;
/// Writes of the host after which there is traffic: more than buffers take.
const UNDER_WAY: usize = 128;
/// A pattern that does not match itself.
const PROGRAM: &str = "lease[s]";

pub(crate) fn run(machine: &Machine, listener: &UnixListener, device: &Device) {
    // There is one agent in a guest.
    let text = machine.shell(&script());
    assert!(text.contains("another `zerosock guest`"), "{text}");
    kill(machine, "TERM", "socket-mod[e]");
    wait_for_end(machine, "guest-keepe[r]");
    let without = format!("/bin/zerosock {NAME} without-sys-admin -- {}", script());
    let text = machine.shell(&without);
    assert!(text.contains("this process needs CAP_SYS_ADMIN"), "{text}");

    exchange(machine, listener);
    // The program has waited for the end of its endpoint, and the keeper has nothing to keep.
    machine.take_in_time(PAGES);
    wait_for_end(machine, "guest-keepe[r]");

    killed(machine, listener, device);
}

/// The command of the program.
fn script() -> String {
    format!("/bin/zerosock {NAME} leases --key /key --port {PORT} --bytes {BYTES}")
}

fn start(machine: &Machine) -> Pending {
    let argv = script().split(' ').map(str::to_owned).collect();
    machine.guest.remote.start(Command::Run { argv })
}

/// A program receives and sends in place.
fn exchange(machine: &Machine, listener: &UnixListener) {
    let client = start(machine);
    let (client, mut socket) = accept(listener, client);
    let sent = Pattern::bytes(1, BYTES);
    let mut sender = socket.try_clone().expect("a descriptor");
    let bytes = sent.clone();
    let sending = thread::spawn(move || {
        sender.write_all(&bytes).expect("a receiver");
        sender.shutdown(Shutdown::Write).expect("a connection");
    });
    let mut received = Vec::new();
    let mut piece = vec![0; BYTES];
    while received.len() < BYTES {
        let len = socket.read(&mut piece).expect("bytes of the guest");
        assert!(len > 0, "{} bytes of {BYTES}", received.len());
        received.extend(&piece[..len]);
    }
    sending.join().expect("all sent");
    drop(socket);
    assert_eq!(sha256(&received), sha256(&Pattern::bytes(SEED, BYTES)));
    let outcome = client.wait(STEP).expect("an outcome");
    let expected = format!(
        "received={BYTES} copied=0 sha256={}\nsent={BYTES} copied=0\n",
        sha256(&sent)
    );
    assert_eq!(outcome.text.as_deref(), Some(expected.as_str()));
}

/// The connection of a program.
fn accept(listener: &UnixListener, client: Pending) -> (Pending, UnixStream) {
    match hybrid::accept(listener, STEP) {
        Ok(socket) => {
            deadlines(&socket);
            (client, socket)
        }
        Err(error) => panic!("{error}: {:?}", client.wait(Duration::from_secs(1))),
    }
}

fn killed(machine: &Machine, listener: &UnixListener, device: &Device) {
    let (client, mut socket) = accept(listener, start(machine));
    // There are no other pages.
    let pool = "cd /sys/kernel/mm/hugepages/hugepages-2048kB; \
                echo $(($(cat nr_hugepages) - $(cat free_hugepages))) > nr_hugepages; cat nr_hugepages";
    let text = machine.shell(pool);
    let pages: u64 = text.trim().parse().expect("a number of pages");
    assert!((1..PAGES).contains(&pages), "{text}");
    let (flows, traffic) = sync_channel(UNDER_WAY);
    let sending = thread::spawn(move || {
        while socket.write_all(&[1; 64 << 10]).is_ok() {
            let _ = flows.try_send(());
        }
    });
    for _ in 0..UNDER_WAY {
        traffic.recv_timeout(STEP).expect("traffic");
    }

    signal(device, Signal::STOP);
    kill(machine, "KILL", PROGRAM);
    client.wait(STEP).expect("its end");
    // Nothing of the program is left but its file, which stays without pages: the keeper has them.
    assert_none_free(machine);
    let truncate = "for file in /run/zerosock/pages/*; do : > $file; done";
    assert_eq!(machine.shell(truncate), "");
    assert_none_free(machine);
    signal(device, Signal::CONT);
    // The daemon ends the endpoint, and with it the connection.
    sending.join().expect("an end");
    // It does not tell anyone, so the pages stay until the next program asks.
    assert_none_free(machine);
    exchange(machine, listener);
    machine.take_in_time(pages);
    wait_for_end(machine, "guest-keepe[r]");
}

fn assert_none_free(machine: &Machine) {
    let text = machine.pages("take --pages 1");
    assert!(text.contains("and 0 of"), "{text}");
}

fn signal(device: &Device, signal: Signal) {
    let pid = i32::try_from(device.id()).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a process"), signal).expect("a daemon");
}

/// Sends a signal to processes of the guest with this in their command line.
fn kill(machine: &Machine, signal: &str, pattern: &str) {
    machine.shell(&format!(
        "for p in /proc/[0-9]*; do grep -q -- '{pattern}' $p/cmdline && kill -{signal} ${{p#/proc/}}; done 2>/dev/null"
    ));
}

/// Until no process of the guest has this in its command line.
fn wait_for_end(machine: &Machine, pattern: &str) {
    machine.shell(&format!(
        "while grep -q -- '{pattern}' /proc/[0-9]*/cmdline 2>/dev/null; do sleep 0.1; done"
    ));
}
