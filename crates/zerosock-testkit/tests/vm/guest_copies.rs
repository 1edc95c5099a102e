//! From a program of the host to a program of a stock guest and back, no byte is copied by either: the loans of one are
//! the leases of the other. The program of the guest has no privileges.

use std::net::Shutdown;
use std::time::Duration;

use sha2::{Digest, Sha256};
use zerosock::daemon::{GuestEndpoints, GuestKey};
use zerosock::vsock::{Host, Stream};
use zerosock::{Cid, Port};
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::guest::NAME;
use zerosock_testkit::guest::leases::SEED;
use zerosock_testkit::protocol::Command;

use crate::Alone;
use crate::guest_pages::Machine;
use crate::lab::{STEP, Skipped, short_dir};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("loans_of_the_host_are_leases_of_the_guest_on_6.12", || {
        exchange("6.12")
    }),
    ("loans_of_the_host_are_leases_of_the_guest_on_6.1", || {
        exchange("6.1")
    }),
];

const CID: Cid = Cid::new(3);
const KEY: &str = "0123456789abcdef0123456789abcdef";
const PORT: u32 = 7;
/// Bytes of a loan at most.
const PIECE: usize = 64 << 10;
/// Bytes each way: `ZEROSOCK_GUEST_MIB` mebibytes, or these. A guest in software emulation hashes slowly in a debug build.
const BYTES: usize = 2 << 20;
/// Longer than a busy machine makes a program wait that has a lease.
const HOLD: Duration = Duration::from_secs(60);

fn exchange(release: &str) -> Result<(), Skipped> {
    let mib = std::env::var("ZEROSOCK_GUEST_MIB");
    let bytes = mib.map_or(BYTES, |mib| {
        mib.parse::<usize>().expect("a number of MiB") << 20
    });
    let limit = STEP + Duration::from_secs(bytes as u64 >> 22);
    let dir = short_dir();
    let vhost = dir.path().join("vhost");
    let key = GuestKey::new(KEY.as_bytes()).expect("a key");
    let host = Host::builder()
        .vm(CID, &vhost)
        .guest_endpoints(CID, GuestEndpoints::new(key))
        // The memory of these guests is a file.
        .allow_unsealed_memory()
        .hold(HOLD)
        .background()
        .start()
        .expect("a host");
    let machine = Machine::boot(release, Some(&vhost))?;
    let setup =
        format!("echo 32 > /proc/sys/vm/nr_hugepages; printf %s {KEY} > /key; chmod 600 /key");
    assert_eq!(machine.shell(&setup), "");
    let agent = "/bin/zerosock guest --key /key --attach-uid 65534 --socket-mode 0666";
    let argv = agent.split(' ').map(str::to_owned).collect();
    let started = machine.guest.remote.run(Command::Start { argv }, STEP);
    started.expect("an agent");
    let waiting = "while ! test -S /run/zerosock/attach.sock; do sleep 0.1; done";
    assert_eq!(machine.shell(waiting), "");
    let listener = host.listen(Port::new(PORT), 1).expect("a port");
    let script = format!(
        "/bin/zerosock {NAME} unprivileged -- /bin/zerosock {NAME} leases \
         --socket /run/zerosock/attach.sock --port {PORT} --bytes {bytes}"
    );
    let argv = ["/bin/busybox", "sh", "-c", &script].map(str::to_owned);
    let client = machine
        .guest
        .remote
        .start(Command::Run { argv: argv.into() });
    let (stream, peer) = listener.accept_timeout(STEP).expect("a connection");
    assert_ne!(peer.cid, CID, "an endpoint has a CID of its own");
    stream.set_read_timeout(Some(limit)).expect("a limit");
    stream.set_write_timeout(Some(limit)).expect("a limit");

    let sent = send(&stream, bytes);
    assert_eq!(receive(&stream), sha256(&Pattern::bytes(SEED, bytes)));
    let stats = stream.stats();
    let both = bytes as u64;
    assert_eq!((stats.sent, stats.sent_in_place), (both, both));
    assert_eq!((stats.received, stats.received_in_place), (both, both));
    drop(stream);
    let outcome = client.wait(limit).expect("an outcome");
    let expected = format!("received={bytes} copied=0 sha256={sent}\nsent={bytes} copied=0\n");
    assert_eq!(outcome.text.as_deref(), Some(expected.as_str()));
    Ok(())
}

/// Sends bytes in loans, and returns their hash.
fn send(stream: &Stream, bytes: usize) -> String {
    let (mut pattern, mut hasher) = (Pattern::new(1), Sha256::new());
    let (mut left, mut piece) = (bytes, vec![0; PIECE]);
    while left > 0 {
        let mut loan = stream.loan(left.min(PIECE)).expect("a loan");
        let len = left.min(loan.capacity());
        let piece = &mut piece[..len];
        pattern.fill(piece);
        hasher.update(&*piece);
        loan.write_at(0, piece).expect("room");
        loan.set_filled(len);
        left -= loan.send().expect("a receiver");
    }
    stream.shutdown(Shutdown::Write).expect("a connection");
    text(hasher)
}

/// Receives all bytes in leases, and returns their hash.
fn receive(stream: &Stream) -> String {
    let mut hasher = Sha256::new();
    while let Some(lease) = stream.recv().expect("bytes of the guest") {
        hasher.update(lease.to_vec());
    }
    text(hasher)
}

fn text(hasher: Sha256) -> String {
    let hash = hasher.finalize();
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}
