//! Processes that a host does not take.

use std::io::ErrorKind;

use zerosock::attach::{AttachError, AttachRequest, Client, Fault};
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
