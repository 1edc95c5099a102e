//! Attach requests that a host refuses.

use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use crate::common::driver::{self, Driver, DriverConfig, FrontendError};
use rustix::process::Uid;
use zerosock::attach::{self, AttachConfig, AttachError, AttachRequest, Attached, Client};
use zerosock::vsock::{
    BindError, ConnectError, ConnectReason, Endpoint, EndpointBuilder, Fault, Host, OpenError,
};

use super::PORT;
use super::hub::Hub;
use crate::common::{self, deadline};

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
            &error,
            driver::DriverAttachError::Frontend(FrontendError::Refused { request, .. })
                if request == "SET_MEM_TABLE"
        ),
        "{error}"
    );
    // Others can still attach.
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
        assert_eq!(kind(OpenError::Place(error)), ErrorKind::AddrInUse);
    }
}

/// The kind of the error after a conversion to `std::io::Error`.
fn kind(error: OpenError) -> ErrorKind {
    std::io::Error::from(error).kind()
}

#[test]
fn every_open_error_names_the_party_at_fault() {
    let hub = Hub::new();
    let open = |builder: EndpointBuilder, path: &Path| {
        let error = builder.attach(path).unwrap_err();
        (error.fault(), kind(error))
    };
    let plain = Endpoint::builder;
    let nowhere = hub.dir.path().join("nowhere");
    let (caller, system) = (Fault::Caller, Fault::System);
    let invalid = ErrorKind::InvalidInput;
    assert_eq!(
        open(plain(), &nowhere),
        (system, ErrorKind::NotFound),
        "nobody there"
    );
    assert_eq!(open(plain().name("a b"), &hub.path()), (caller, invalid));
    let ports = (0..300).map(zerosock::Port::new);
    assert_eq!(open(plain().ports(ports), &hub.path()), (caller, invalid));
    assert_eq!(
        open(plain().queue_size(100), &hub.path()),
        (caller, invalid)
    );
    // A listener that is no attach server, and closes the connection.
    let rude = hub.dir.path().join("rude.sock");
    let listener = attach::listen(&rude).unwrap();
    rustix::io::ioctl_fionbio(&listener, false).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(rustix::net::accept(&listener).unwrap()));
        let gone = (Fault::Peer, ErrorKind::ConnectionAborted);
        assert_eq!(open(plain(), &rude), gone);
    });
    // And two devices at one path.
    let first = Endpoint::builder().attach_device(hub.vm()).unwrap();
    let error = Endpoint::builder().attach_device(hub.vm()).unwrap_err();
    assert_eq!(error.fault(), Fault::Peer, "{error}");
    assert_eq!(kind(error), ErrorKind::ConnectionAborted);
    drop(first);
}

/// The inner error.
#[track_caller]
fn reason<T: std::error::Error + Copy + 'static>(error: &std::io::Error) -> T {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    *inner.unwrap_or_else(|| panic!("untyped: {error}"))
}

#[test]
fn a_failed_connect_reports_a_timeout_or_a_refusal() {
    let hub = Hub::new();
    let soon = std::time::Duration::from_millis(100);
    let process = hub.process_with("asks", |builder| builder.connect_timeout(soon));
    let silent = hub.process("silent");
    let to = |cid| zerosock::Address::new(cid, PORT);
    // No thread runs it.
    let error = process.connect(to(silent.cid())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(
        reason::<ConnectError>(&error).reason(),
        ConnectReason::TimedOut
    );
    // The host has no listener; on a busy machine its refusal may be late.
    let error = loop {
        let error = process.connect(to(zerosock::Cid::HOST)).unwrap_err();
        if error.kind() != ErrorKind::TimedOut {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
    assert_eq!(
        reason::<ConnectError>(&error).reason(),
        ConnectReason::Refused
    );
    let error = process.connect(to(zerosock::Cid::ANY)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::HostUnreachable, "{error}");
    assert_eq!(
        reason::<ConnectError>(&error).reason(),
        ConnectReason::Unreachable
    );
}

#[test]
fn a_port_that_was_not_named_is_not_listened_on() {
    let hub = Hub::new();
    let process = hub.process_with("db", |builder| builder.ports([PORT]));
    let _listener = process.listen(PORT, 1).unwrap();
    let other = zerosock::Port::new(PORT.get() + 1);
    let error = process.listen(other, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(reason::<BindError>(&error), BindError::NotNamed(other));
    let error = process.listen(PORT, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrInUse);
    assert_eq!(reason::<BindError>(&error), BindError::InUse);
    // A process that names no ports may listen on any. A device takes no port names.
    hub.process("web").listen(other, 1).unwrap();
    let builder = Endpoint::builder().ports([PORT]);
    let guest = builder.attach_device(hub.vm()).unwrap();
    guest.listen(other, 1).unwrap();
}

#[test]
fn a_message_of_64_kib_is_one_packet_to_a_process() {
    let hub = Hub::new();
    let process = hub.process("reads");
    let (ours, theirs) = hub.joined(&process);
    let mut loan = ours.loan(64 << 10).unwrap();
    assert_eq!(loan.capacity(), 64 << 10);
    loan.write_all(&[7; 64 << 10]).unwrap();
    loan.send().unwrap();
    assert_eq!(theirs.recv().unwrap().unwrap().len(), 64 << 10);
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

/// The answer to an attach request of another user. Credentials are per thread.
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
fn mode_and_uid_admit_another_user() {
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        let reason = "only root can become another user";
        // Written directly, because the harness hides the output of a test that passes.
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
    // Also at a socket that the program has made itself, with its own permissions.
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
    // A test that starts a program holds a copy of the closed listener until the program is executed.
    let give_up = deadline();
    while !matches!(
        Endpoint::attach(&first),
        Err(OpenError::Place(AttachError::Connect { .. }))
    ) {
        assert!(Instant::now() < give_up, "the first socket still listens");
    }
    Endpoint::attach(dir.path().join("path")).unwrap();
    drop(hub);
    // The window of a process, as set in the terms and in the builder.
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
