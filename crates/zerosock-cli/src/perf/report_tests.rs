//! Unit tests of `report`.

use super::*;

#[test]
fn the_documents_figures_are_labelled() {
    let took = Duration::from_millis(2500);
    assert_eq!(
        server(2 << 30, took).text,
        "tx loop: 2.500000 sec\ntx rate: 6.872 Gbit/s"
    );
    let counted = Counted {
        bytes: 2 << 30,
        total: took,
        dequeue: Duration::from_millis(500),
        dequeues: 1000,
    };
    assert_eq!(
        client(Mode::Copy, &counted, None).text,
        "received: 2147483648 bytes\nrx loop: 2.500000 sec\nrx rate: 6.872 Gbit/s\n\
             total in 'read()': 0.500000 sec\nPOLLIN wake-ups: 1000\naverage in 'read()': 500000 ns"
    );
    let polling = client(
        Mode::InPlacePolling,
        &counted,
        Some(EndpointStats::default()),
    )
    .text;
    assert!(!polling.contains("POLLIN"), "{polling}");
    assert!(polling.contains("average in 'fill()' + 'release()': 500000 ns\nin place: 0 bytes"));
    let in_place = client(Mode::InPlace, &counted, None).text;
    assert!(in_place.contains("POLLIN wake-ups: 1000"));
}

#[test]
fn a_reset_is_not_taken_for_a_missing_listener() {
    let peer = Address::new(zerosock::Cid::HOST, zerosock::Port::new(7));
    let text = |kind: io::ErrorKind| not_connected(peer, &kind.into()).to_string();
    let reset = text(io::ErrorKind::ConnectionReset);
    assert!(
        reset.contains("no listener, its backlog is full, a target"),
        "{reset}"
    );
    assert!(!text(io::ErrorKind::TimedOut).contains("listener"));
}

#[test]
fn a_reset_after_copies_names_the_credit() {
    let text = |kind: io::ErrorKind, copied_aside| {
        let mut stats = EndpointStats::default();
        stats.copied_aside = copied_aside;
        interrupted(kind.into(), stats).to_string()
    };
    let reset = text(io::ErrorKind::ConnectionReset, 7);
    assert!(reset.contains("7 bytes were not read in time"), "{reset}");
    assert!(reset.contains("a lower -v"), "{reset}");
    for (kind, copied_aside) in [
        (io::ErrorKind::ConnectionReset, 0),
        (io::ErrorKind::BrokenPipe, 7),
    ] {
        let other = text(kind, copied_aside);
        assert!(!other.contains("-v"), "{other}");
    }
}
