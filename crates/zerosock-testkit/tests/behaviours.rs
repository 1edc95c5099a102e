//! Behaviours that programs expect of vsock, tested between processes: through a daemon, and with a
//! program that embeds the device on either side. `tests/vm` tests the same list with guests.

mod behaviour;

use std::path::Path;
use std::time::Duration;

use behaviour::library::Library;
use behaviour::side::STEP;
use behaviour::{ALL, Behaviour, With, each_behaviour, pairs, show, table};
use zerosock::Cid;
use zerosock::daemon::{Daemon, DaemonConfig, HostSide, VmConfig};
use zerosock::vsock::{Endpoint, Host};

/// Two attached processes at a daemon, which copies once from one to the other.
mod process_to_process {
    super::each_behaviour!(super::between_processes);
}

/// A process connects to the program that embeds the device.
mod process_to_host {
    super::each_behaviour!(super::with_a_host);
}

/// A program that embeds the device connects to a process.
mod host_to_process {
    super::each_behaviour!(super::from_a_host);
}

/// docs/behaviours.md has a row for each behaviour and for nothing else; those without a claim here
/// need kernel sockets.
#[test]
fn the_table_has_all_of_the_list() {
    let sorted = |mut names: Vec<&'static str>| {
        names.sort_unstable();
        names
    };
    let listed = |here: fn(&Behaviour) -> bool| {
        let found = ALL.iter().filter(|one| here(one));
        sorted(found.map(|one| one.name).collect())
    };
    assert_eq!(sorted(table::names()), listed(|_| true));
    let here = listed(|one| one.with == With::Any);
    assert_eq!(sorted(table::between_processes()), here);
}

fn vm(dir: &Path, cid: u32) -> VmConfig {
    let socket = dir.join(format!("{cid}.sock"));
    VmConfig {
        cid: Cid::new(cid),
        listener: std::os::unix::net::UnixListener::bind(socket).expect("a socket"),
        host: HostSide::None,
        buf_alloc: 262_144,
        queue_size: 1024,
        groups: vec!["default".into()],
        require_sealed_memory: false,
        stopped_timeout: None,
        guest_endpoints: None,
        succession: None,
    }
}

/// Longer than any step may take: a refusal within a step was no time-out.
const CONNECTING: Duration = STEP.saturating_mul(2);

fn endpoint(dir: &Path, cid: u32) -> Library {
    let endpoint = Endpoint::builder()
        .connect_timeout(CONNECTING)
        .queue_pairs(pairs())
        .attach_device(dir.join(format!("{cid}.sock")));
    Library::new(endpoint.expect("an endpoint"))
}

fn between_processes(name: &str) {
    let dir = tempfile::tempdir().expect("a directory");
    let vms = vec![vm(dir.path(), 3), vm(dir.path(), 4)];
    let config = DaemonConfig {
        queue_pairs: pairs(),
        workers: usize::from(pairs()).min(2),
        vms,
        connect_timeout: CONNECTING,
        ..DaemonConfig::default()
    };
    let daemon = Daemon::start(config).expect("a daemon");
    show(name, &endpoint(dir.path(), 3), &endpoint(dir.path(), 4));
    daemon.shutdown();
}

/// A host, and an attached process.
fn hosted(test: impl FnOnce(&Library, &Library)) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("attach.sock");
    let host = Host::builder()
        .connect_timeout(CONNECTING)
        .queue_pairs(pairs())
        .attach(&path)
        .start()
        .expect("a host");
    let host = Library::new(host);
    let process = Library::new(
        Endpoint::builder()
            .connect_timeout(CONNECTING)
            .queue_pairs(pairs())
            .attach(&path)
            .expect("a process"),
    );
    test(&host, &process);
}

fn with_a_host(name: &str) {
    hosted(|host, process| show(name, process, host));
}

fn from_a_host(name: &str) {
    hosted(|host, process| show(name, host, process));
}
