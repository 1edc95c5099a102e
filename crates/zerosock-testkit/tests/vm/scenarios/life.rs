//! Guests that connect to each other, serve, reboot and crash.

use std::io::{BufRead, BufReader, Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use zerosock_cli::vm::hybrid::HybridError;
use zerosock_testkit::guest;
use zerosock_testkit::protocol::Command;

use crate::lab::{Lab, STEP, Vm, expected, port, read_exact, write};

/// Tests each kind of traffic of a guest briefly.
fn exchange(vm: &Vm, seed: u64) {
    const LEN: u64 = 2 << 20;
    let (socket, stream) = vm.to_host();
    let sending = vm.send(socket, seed, LEN, &[65536]);
    assert_eq!(read_exact(&stream, LEN), expected(seed, LEN));
    assert_eq!(sending.wait(STEP).expect("sent").errno, None);
    vm.close(socket);
    let (socket, stream) = vm.to_guest();
    let receiving = vm.receive(socket, Some(LEN));
    let digest = write(&stream, seed, LEN, &[65536]);
    assert_eq!(receiving.wait(STEP).expect("received").sha256, Some(digest));
    vm.close(socket);
}

/// Debian's guest agent listens on a vsock port, and the host talks to it through the device.
pub(crate) fn qemu_guest_agent(lab: &Lab) {
    if let Some(reason) = &lab.qemu_ga {
        println!("SKIPPED qemu_guest_agent: {reason}");
        return;
    }
    let vm = &lab.a;
    let port = port();
    let argv = [
        "/bin/qemu-ga",
        "--method=vsock-listen",
        &format!("--path={}:{port}", vm.endpoint.cid),
        "--pidfile=/tmp/qga.pid",
        "--statedir=/tmp",
    ];
    vm.run(Command::Start {
        argv: argv.map(str::to_owned).to_vec(),
    });
    let deadline = Instant::now() + STEP;
    let stream = loop {
        match vm.connect(port) {
            Ok(stream) => break stream,
            // It does not listen yet; each attempt is a round trip to the guest.
            Err(HybridError::Refused(_)) if Instant::now() < deadline => {}
            Err(error) => panic!("qemu-ga: {error}"),
        }
    };
    let mut answers = BufReader::new(stream.try_clone().expect("a second handle"));
    let mut ask = |command: &str| -> serde_json::Value {
        writeln!(&stream, "{{\"execute\": \"{command}\"}}").expect("asked");
        let mut line = String::new();
        answers.read_line(&mut line).expect("answered");
        serde_json::from_str(&line).expect("JSON")
    };
    assert_eq!(ask("guest-ping"), serde_json::json!({ "return": {} }));
    let info = ask("guest-info");
    assert!(info["return"]["version"].is_string(), "{info}");
}

/// `serve --forward-cid` relays to the kernel's AF_VSOCK, which is opened only inside the guest: a
/// daemon runs there, with zerosock's driver half as its guest, and the kernel's loopback.
pub(crate) fn forward(lab: &Lab) {
    let argv = ["/bin/zerosock", guest::NAME, "forward"];
    let done = lab.a.run(Command::Run {
        argv: argv.map(str::to_owned).to_vec(),
    });
    let said = done.text.unwrap_or_default();
    assert!(done.bytes == 0 && said.contains("forward: ok"), "{said}");
}

/// Guest to guest by CID, both ways at once, and a refusal.
pub(crate) fn siblings(lab: &Lab) {
    const LEN: u64 = 8 << 20;
    let (a, b) = (&lab.a, &lab.b);
    let port = port();
    let listener = a.listen(port);
    let accepting = a.start(Command::Accept { socket: listener });
    let there = b
        .remote()
        .socket(
            Command::Connect {
                cid: a.endpoint.cid,
                port,
            },
            STEP,
        )
        .expect("b connected to a");
    let accepted = accepting.wait(STEP).expect("accepted");
    assert_eq!(accepted.peer.map(|(cid, _)| cid), Some(b.endpoint.cid));
    let here = accepted.socket.expect("a socket");
    let receiving = (a.receive(here, Some(LEN)), b.receive(there, Some(LEN)));
    let sending = (
        a.send(here, 90, LEN, &[65536]),
        b.send(there, 91, LEN, &[65536]),
    );
    assert_eq!(
        receiving.0.wait(STEP).expect("a received").sha256,
        Some(expected(91, LEN))
    );
    assert_eq!(
        receiving.1.wait(STEP).expect("b received").sha256,
        Some(expected(90, LEN))
    );
    assert_eq!(sending.0.wait(STEP).expect("a sent").errno, None);
    assert_eq!(sending.1.wait(STEP).expect("b sent").errno, None);
    a.close(here);
    let end = b.receive(there, None).wait(STEP).expect("the end");
    assert_eq!((end.bytes, end.end), (0, true));
    b.close(there);
    a.close(listener);
    let refused = b.run(Command::Connect {
        cid: a.endpoint.cid,
        port,
    });
    assert_eq!(refused.errno.as_deref(), Some("ECONNRESET"));
}

/// A guest reboots while the daemon runs and the other guest is busy: its connections end, the
/// other's do not, and it can connect and accept again.
pub(crate) fn reboot(lab: &Lab) {
    const LEN: u64 = 16 << 20;
    let (busy, stream) = lab.a.to_host();
    let sending = lab.a.send(busy, 100, LEN, &[65536]);
    let reading = thread::spawn(move || read_exact(&stream, LEN));

    let vm = &lab.b;
    let boots = vm.remote().boots();
    let (_, mut old) = vm.to_host();
    let _ = vm.start(Command::Reboot);
    vm.remote()
        .wait_for_boot(boots + 1, STEP)
        .expect("the guest boots again");
    // Any outcome but a hang.
    match old.read(&mut [0]) {
        Ok(0) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        other => panic!("the connection of before the reboot: {other:?}"),
    }
    exchange(vm, 101);
    assert_eq!(reading.join().expect("read"), expected(100, LEN));
    assert_eq!(sending.wait(STEP).expect("sent").errno, None);
    lab.a.close(busy);
}

/// QEMU dies with connections open: their host ends see the end, the device says so in its log,
/// the other guest is unharmed, and a new QEMU on the same socket works.
pub(crate) fn front_end_killed(lab: &Lab) {
    let vm = &lab.b;
    let (_, mut open) = vm.to_host();
    vm.kill();
    match open.read(&mut [0]) {
        Ok(0) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        other => panic!("the dead guest's connection: {other:?}"),
    }
    exchange(&lab.a, 110);
    let start = Instant::now();
    match vm.connect(port()) {
        Err(HybridError::Refused(_)) => {}
        other => panic!("a guest that is not there: {other:?}"),
    }
    assert!(start.elapsed() < Duration::from_secs(5));
    lab.boot_b();
    exchange(vm, 111);
    exchange(&lab.a, 112);
    let mut device = lab.device.lock().expect("the device");
    assert!(device.is_running());
    if std::env::var_os("ZEROSOCK_DEVICE").is_none() {
        assert!(
            device.log.contains("front-end"),
            "its log tells of the front-end"
        );
    }
}
