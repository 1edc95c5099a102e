//! The number of open descriptors returns to its initial value.
//!
//! The only test of this program, because others in the same process would open and close
//! descriptors.

mod common;

use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use crate::common::driver::{Driver, Port};
use common::raw::RawGuest;
use common::{TestDaemon, connect_guest, deadline, eventually, eventually_with, host, open_fds};

#[test]
fn descriptors_return_to_their_number_after_many_connections() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    let listener = daemon.host_listener(2000);
    guest.listen(Port::new(1000), 8).unwrap();
    let uds_path = daemon.uds_path();
    let round = |guest: &mut Driver| {
        // From the guest: good and refused.
        let stream = guest.wait_connect(host(2000), deadline()).unwrap();
        let (program, _) = listener.accept().unwrap();
        guest.wait_send(stream, b"x", deadline()).unwrap();
        drop(program);
        guest.close(stream);
        assert!(guest.wait_connect(host(9), deadline()).is_err());
        // From the host: good, refused, and one that leaves at once.
        for port in [1000, 9] {
            let uds_path = uds_path.clone();
            let program = thread::spawn(move || connect_guest(&uds_path, port).map(drop).is_ok());
            eventually_with(guest, "answered", |_| program.is_finished());
            assert_eq!(program.join().unwrap(), port == 1000);
        }
        let stream = guest.wait_accept(Port::new(1000), deadline()).unwrap();
        guest.close(stream);
        drop(UnixStream::connect(&uds_path).unwrap());
        guest.drive().unwrap();
    };
    round(&mut guest);
    let settle = |guest: &mut Driver| {
        eventually_with(guest, "all connections gone", |guest| {
            let _ = guest.drive();
            daemon
                .stats()
                .is_none_or(|stats| stats.conns_removed == stats.conns_added)
        });
    };
    settle(&mut guest);
    eventually("the first round's sockets gone", || {
        let before = open_fds();
        thread::sleep(Duration::from_millis(20));
        open_fds() == before
    });
    let before = open_fds();
    for _ in 0..100 {
        round(&mut guest);
    }
    settle(&mut guest);
    eventually("as many descriptors as before", || open_fds() <= before);
    // Guests come and go as well: sockets, eventfds and memory.
    drop(guest);
    eventually("the guest's descriptors gone", || open_fds() < before);
    let without = open_fds();
    for _ in 0..10 {
        drop(daemon.guest());
        drop(RawGuest::attach(&daemon.vms[0].socket));
    }
    eventually("as many descriptors as without guests", || {
        open_fds() <= without
    });
}
