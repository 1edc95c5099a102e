//! Ends of attached processes and services, beyond the matrix.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use zerosock::vsock::Endpoint;
use zerosock::{Address, Cid, Port};

use crate::process::wait_until;
use crate::{pattern, read_all, serve, start, terminate};

#[test]
fn a_target_that_is_gone_ends_the_connection_of_an_attached_process() {
    let dir = tempfile::tempdir().unwrap();
    let (serve, attach) = serve(dir.path());
    let path = dir.path().join("target");
    let from = format!("service-listen:{attach}:514");
    let (running, _) = start(&[&from, &format!("unix:{}", path.display())]);
    let process = Endpoint::attach(&attach).unwrap();
    let host = Address::new(Cid::new(2), Port::new(514));
    let stream = process.connect(host).unwrap();
    let mut got = [0];
    assert!(matches!((&stream).read(&mut got), Ok(0) | Err(_)));
    wait_until("the log", || running.stderr().contains("cannot connect"));
    terminate(running);
    drop(serve);
}

#[test]
fn a_full_target_holds_no_buffer_of_the_sender() {
    let dir = tempfile::tempdir().unwrap();
    let (serve, attach) = serve(dir.path());
    let path = dir.path().join("target");
    let target = UnixListener::bind(&path).unwrap();
    let from = format!("service-listen:{attach}:9");
    let (running, _) = start(&[&from, &format!("unix:{}", path.display())]);
    let process = Endpoint::attach(&attach).unwrap();
    let host = Address::new(Cid::new(2), Port::new(9));
    let full = process.connect(host).unwrap();
    let (held, _) = target.accept().unwrap();
    full.set_write_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let bytes = pattern(8 << 20);
    let mut sent = 0;
    while let Ok(more) = (&full).write(&bytes[sent..]) {
        sent += more;
        assert!(sent < bytes.len(), "it never stops");
    }
    // Another connection of the same endpoint goes on.
    let other = process.connect(host).unwrap();
    let (mut served, _) = target.accept().unwrap();
    (&other).write_all(b"passes").unwrap();
    served.read_exact(&mut [0; 6]).unwrap();
    full.shutdown(Shutdown::Write).unwrap();
    assert!(read_all(&held) == bytes[..sent]);
    terminate(running);
    drop(serve);
}
