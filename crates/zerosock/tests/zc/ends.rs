//! A stream's end, as the peer sees it, when its sender is dropped.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use zerosock::zc::{Backend, Copying, Outgoing, Sender};

#[test]
fn the_peer_is_told_of_the_end_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let took = (0..20).map(|_| {
        let socket = TcpStream::connect(listener.local_addr().expect("it")).expect("loopback");
        let mut peer = listener.accept().expect("a stream").0;
        let builder = Sender::builder().backend(Backend::Uring);
        let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        let outgoing = Outgoing::new(vec![1; 5000]).copying(Copying::Never);
        let sent = sender.send(outgoing).map_err(|refused| refused.why);
        sent.expect("it is accepted");
        assert!(sender.finish(Some(Duration::from_secs(60))).expect("it"));
        drop(sender);
        let begun = Instant::now();
        let mut bytes = Vec::new();
        peer.read_to_end(&mut bytes).expect("the end");
        assert_eq!(bytes, [1; 5000]);
        begun.elapsed()
    });
    // The kernel takes rings apart later, which is some 20 ms; a busy machine can be slow, too.
    let best = took.min().expect("some");
    assert!(best < Duration::from_millis(10), "{best:?}");
}
