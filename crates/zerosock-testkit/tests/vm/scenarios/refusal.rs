//! A refused connect fails at once.

use std::time::{Duration, Instant};

use zerosock_cli::vm::hybrid::{self, HybridError};
use zerosock_testkit::protocol::{Command, Outcome};

use crate::lab::{AT_ONCE, Lab, STEP, port, read_exact};

fn refused(outcome: &Outcome) {
    assert_eq!(outcome.errno.as_deref(), Some("ECONNRESET"));
    let took = Duration::from_micros(outcome.elapsed_us);
    assert!(took < AT_ONCE, "known only after {took:?}");
}

pub(crate) fn host_refuses(lab: &Lab) {
    let vm = &lab.a;
    let port = port();
    refused(&vm.run(Command::Connect { cid: 2, port }));
    // A stale socket file without a listener.
    drop(vm.host_listener(port));
    refused(&vm.run(Command::Connect { cid: 2, port }));
    // The same port works as soon as there is a listener.
    let listener = vm.host_listener(port);
    let connecting = vm.start(Command::Connect { cid: 2, port });
    let stream = hybrid::accept(&listener, STEP).expect("the guest's connection");
    let socket = connecting.socket(STEP).expect("connected");
    let sending = vm.send(socket, 1, 10, &[10]);
    read_exact(&stream, 10);
    sending.wait(STEP).expect("sent");
    vm.close(socket);
    // A CID without an endpoint.
    refused(&vm.run(Command::Connect { cid: 77, port }));
}

pub(crate) fn guest_refuses(lab: &Lab) {
    let vm = &lab.a;
    let port = port();
    let refused = |limit: Duration| {
        let start = Instant::now();
        match vm.connect(port) {
            Err(HybridError::Refused(_)) => {}
            other => panic!("expected a refusal, got {other:?}"),
        }
        let took = start.elapsed();
        assert!(took < limit, "known only after {took:?}");
    };
    refused(AT_ONCE);
    let listener = vm.listen(port);
    vm.connect(port).expect("connected while somebody listens");
    vm.close(listener);
    // For a second after the port has accepted a connection, a reset may be that of a full backlog.
    refused(AT_ONCE + Duration::from_secs(1));
}
