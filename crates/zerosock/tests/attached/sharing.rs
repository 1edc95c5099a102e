//! One endpoint used by many threads: which handles can be shared and sent, and that a spinning
//! thread starves no other.

use std::io::{Read, Write};
use std::thread;

use zerosock::vsock::{
    Endpoint, EndpointBuilder, Host, HostBuilder, Lease, LeaseReader, Listener, Loan, OwnedLease,
    Poller, Stream, Wait,
};

use super::hub::Hub;
use crate::common::{assert_bytes, bytes};

fn is_send<T: Send>() {}
fn is_sync<T: Sync>() {}

#[test]
fn handles_are_send_and_sync() {
    is_send::<Stream>();
    is_sync::<Stream>();
    is_send::<Listener>();
    is_sync::<Listener>();
    is_send::<Endpoint>();
    is_sync::<Endpoint>();
    is_send::<Host>();
    is_sync::<Host>();
    is_send::<EndpointBuilder>();
    is_send::<HostBuilder>();
    is_send::<Lease<'_>>();
    is_sync::<Lease<'_>>();
    is_send::<OwnedLease>();
    is_sync::<OwnedLease>();
    is_send::<LeaseReader<'_>>();
    is_sync::<LeaseReader<'_>>();
    is_send::<Loan<'_>>();
    is_sync::<Loan<'_>>();
    is_send::<Poller>();
}

#[test]
fn a_thread_that_spins_in_a_read_lets_others_write() {
    const ROUNDS: usize = 500;
    let hub = Hub::new();
    let process = hub.process_with("p", |builder| builder.wait(Wait::Spin));
    let (mut silent, talker) = hub.joined(&process);
    // The spinning read is on another connection of the same endpoint, which receives nothing.
    let (answers, waiting) = hub.joined(&process);
    thread::scope(|scope| {
        let spinner = scope.spawn(|| {
            let mut byte = [0];
            (&waiting).read_exact(&mut byte).unwrap();
        });
        let echo = scope.spawn(move || {
            let mut got = vec![0; 1000];
            for _ in 0..ROUNDS {
                silent.read_exact(&mut got).unwrap();
                silent.write_all(&got).unwrap();
            }
        });
        let message = bytes(1, 1000);
        let mut got = vec![0; 1000];
        for _ in 0..ROUNDS {
            (&talker).write_all(&message).unwrap();
            (&talker).read_exact(&mut got).unwrap();
            assert_bytes(&got, &message);
        }
        echo.join().unwrap();
        (&answers).write_all(b"!").unwrap();
        spinner.join().unwrap();
    });
}
