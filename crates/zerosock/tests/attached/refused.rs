//! Processes that a host does not take.

use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::process::Uid;
use zerosock::attach::{self, AttachConfig, AttachError, AttachRequest, Attached, Client, Fault};
use zerosock::driver::{self, Driver, DriverConfig, FrontendError};
use zerosock::vsock::{Endpoint, Host, OpenError};

use super::common;
use super::hub::Hub;

#[test]
fn memory_that_can_shrink_is_refused_by_a_host() {
    let hub = Hub::new();
    let request = AttachRequest::default();
    let attached = Client::connect_within(&hub.path(), &request, common::PATIENCE).unwrap();
    let config = DriverConfig {
        seal: false,
        ..DriverConfig::default()
    };
    let error = Driver::attach_over(attached.socket, config).unwrap_err();
    assert!(
        matches!(
            error,
            driver::AttachError::Frontend(FrontendError::Refused {
                request: "SET_MEM_TABLE",
                ..
            })
        ),
        "{error}"
    );
    // Nobody else minds.
    Endpoint::attach(hub.path()).unwrap();
}

#[test]
fn a_taken_cid_or_name_is_the_callers_fault() {
    let hub = Hub::new();
    let first = Endpoint::builder().name("db").attach(hub.path()).unwrap();
    for builder in [
        Endpoint::builder().name("db"),
        Endpoint::builder().cid(first.cid()),
        // The VM's.
        Endpoint::builder().cid(zerosock::Cid::new(3)),
    ] {
        let Err(OpenError::Place(error)) = builder.attach(hub.path()) else {
            panic!("taken twice");
        };
        assert!(matches!(
            error,
            AttachError::CidTaken(_) | AttachError::NameTaken(_)
        ));
        assert_eq!(error.fault(), Fault::Caller);
    }
}

#[test]
fn a_socket_in_use_is_named() {
    let hub = Hub::new();
    let error = Host::builder().attach(hub.path()).start().unwrap_err();
    let zerosock::daemon::StartError::Bind { path, source } = error else {
        panic!("{error}");
    };
    assert_eq!(path, hub.path());
    assert_eq!(source.kind(), ErrorKind::AddrInUse);
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn the_sockets_of_a_host_are_its_users_own() {
    let hub = Hub::new();
    assert_eq!((mode(&hub.path()), mode(&hub.vm())), (0o600, 0o600));
    let hub = Hub::with(|builder| builder.attach_mode(0o666).socket_mode(0o660));
    assert_eq!((mode(&hub.path()), mode(&hub.vm())), (0o666, 0o660));
}

/// What another user is told who asks for a place. The credentials are a thread's own.
fn ask_as(uid: u32, path: &Path) -> Result<Attached, AttachError> {
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let uid = Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            Client::connect_within(path, &AttachRequest::default(), common::PATIENCE)
        });
        asking.join().unwrap()
    })
}

#[test]
fn another_user_is_let_in_by_mode_and_uid() {
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        let reason = "only root can become another user";
        // Past the harness, which shows nothing of a test that passes.
        let _ = writeln!(std::io::stdout(), "\nSKIPPED users: {reason}");
        return;
    }
    let open = |hub: &Hub| {
        let all = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(hub.dir.path(), all).unwrap();
    };
    let hub = Hub::with(|builder| builder.allow_uid(NOBODY));
    open(&hub);
    let error = ask_as(NOBODY, &hub.path()).unwrap_err();
    assert!(
        matches!(&error, AttachError::Connect { source, .. }
            if source.kind() == ErrorKind::PermissionDenied),
        "{error}"
    );
    let hub = Hub::with(|builder| builder.attach_mode(0o666));
    open(&hub);
    let error = ask_as(NOBODY, &hub.path()).unwrap_err();
    assert!(matches!(error, AttachError::NotPermitted), "{error}");
    assert_eq!(error.fault(), Fault::Caller);
    let hub = Hub::with(|builder| builder.attach_mode(0o666).allow_uid(NOBODY));
    open(&hub);
    ask_as(NOBODY, &hub.path()).unwrap();
    // Also at a socket of the program's own, whose file is the program's affair.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("own.sock");
    let own = AttachConfig::new(attach::listen(&path).unwrap());
    for path in [dir.path(), &path] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let _hub = Hub::with(|builder| builder.attach_with(own).allow_uid(NOBODY));
    ask_as(NOBODY, &path).unwrap();
}

#[test]
fn the_last_attach_socket_that_is_named_is_the_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let own = |name| {
        let path = dir.path().join(name);
        let mut config = AttachConfig::new(attach::listen(&path).unwrap());
        config.buf_alloc = 12_345;
        (path, config)
    };
    let (first, config) = own("first");
    let (last, others) = own("last");
    let hub = Hub::with(|builder| builder.attach_with(config).attach(dir.path().join("path")));
    assert!(matches!(
        Endpoint::attach(&first),
        Err(OpenError::Place(AttachError::Connect { .. }))
    ));
    Endpoint::attach(dir.path().join("path")).unwrap();
    drop(hub);
    // What a process may have under way, by the terms and by the builder.
    let hub = Hub::with(|builder| builder.attach_with(others));
    assert_eq!(under_way(&hub, &last), 12_345);
    drop(hub);
    let (last, others) = own("window");
    let hub = Hub::with(|builder| builder.window(4321).attach_with(others));
    assert_eq!(under_way(&hub, &last), 4321);
}

/// Bytes that a process can send to a host that reads nothing.
fn under_way(hub: &Hub, path: &Path) -> usize {
    let process = Endpoint::attach(path).unwrap();
    let (_ours, theirs) = hub.joined(&process);
    theirs.set_nonblocking(true).unwrap();
    let mut sent = 0;
    loop {
        match (&theirs).write(&[0; 1000]) {
            Ok(len) => sent += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return sent,
            Err(error) => panic!("{error}"),
        }
    }
}
