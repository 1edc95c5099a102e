//! Headers that lie, and frames that are none.

use zerosock_net::stats::NetStats;
use zerosock_proto::wire::net::{
    F_CSUM, F_HOST_TSO4, F_MTU, GSO_TCPV4, GSO_TCPV6, Header, NEEDS_CSUM,
};

use super::frames::{plain, tcp, tso};
use super::network::{Network, Setup, isolated, wait_until};

/// Sends a frame and waits until it was dropped for this reason.
fn dropped(
    (network, driver): (&Network, &mut super::driver::Driver),
    header: &Header,
    frame: &[u8],
    reason: impl Fn(NetStats) -> u64,
) {
    let before = network.stats();
    driver.send(0, header, frame, &[12]);
    driver.wait_sent(0);
    wait_until("counted", || reason(network.stats()) == reason(before) + 1);
    assert_eq!(network.stats().tx_frames, before.tx_frames, "{header:?}");
}

#[test]
fn headers_that_lie_are_dropped_and_counted() {
    isolated("headers_that_lie_are_dropped_and_counted", || {
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(F_CSUM | F_HOST_TSO4);
        let (partial, frame) = tcp(3000, 1);
        let lies: [fn(&mut Header); 9] = [
            |h| h.set_csum_start(13),
            |h| h.set_csum_start(60_000),
            |h| h.set_csum_offset(65_535),
            |h| h.set_gso_size(0),
            |h| h.set_hdr_len(60_000),
            |h| h.set_flags(0),
            |h| h.set_gso_type(GSO_TCPV6),
            |h| h.set_gso_type(GSO_TCPV4 | 0x80),
            |h| h.set_gso_type(3),
        ];
        for lie in lies {
            let mut header = tso(partial);
            lie(&mut header);
            let both = (&network, &mut driver);
            dropped(both, &header, &frame, |stats| stats.tx_bad_header);
        }
        // The next honest one passes. `num_buffers` and unknown flags have no meaning.
        let mut header = tso(partial);
        header.set_num_buffers(0xffff);
        header.set_flags(0xfc | NEEDS_CSUM);
        driver.send(0, &header, &frame, &[12]);
        driver.wait_sent(0);
        let (mut received, bytes) = network.receive();
        // A hint, which the kernel has changed.
        received.set_hdr_len(54);
        assert!((received, bytes) == (tso(partial), frame), "{received:?}");
        driver.check_guards();
    });
}

#[test]
fn offloads_that_were_not_negotiated_are_refused() {
    isolated("offloads_that_were_not_negotiated_are_refused", || {
        let network = Network::new(&Setup::default());
        let (partial, frame) = tcp(3000, 1);
        let mut driver = network.attach(F_CSUM);
        let both = (&network, &mut driver);
        dropped(both, &tso(partial), &frame, |stats| stats.tx_bad_header);
        drop(driver);
        let mut driver = network.attach(0);
        let both = (&network, &mut driver);
        dropped(both, &partial, &frame, |stats| stats.tx_bad_header);
    });
}

#[test]
fn runts_and_frames_beyond_the_mtu_are_dropped_and_counted() {
    isolated(
        "runts_and_frames_beyond_the_mtu_are_dropped_and_counted",
        || {
            let network = Network::new(&Setup {
                mtu: Some(9000),
                ..Setup::default()
            });
            let mut driver = network.attach(F_MTU);
            let none = Header::default();
            for len in [1, 13] {
                let both = (&network, &mut driver);
                let frame = &plain(14, 1)[..len];
                dropped(both, &none, frame, |stats| stats.tx_runt);
            }
            // Not even a whole header.
            let before = network.stats().tx_runt;
            driver.send_bytes(1, &[0; 5], &[]);
            driver.wait_sent(0);
            wait_until("counted", || network.stats().tx_runt == before + 1);
            // Two VLAN tags do not count.
            let both = (&network, &mut driver);
            dropped(both, &none, &plain(9023, 1), |stats| stats.tx_too_long);
            driver.send(0, &none, &plain(9022, 1), &[]);
            assert_eq!(network.receive().1, plain(9022, 1));
            driver.wait_sent(0);
            drop(driver);
            // Without an MTU, 64 KiB are the limit.
            let mut driver = network.attach(0);
            let both = (&network, &mut driver);
            dropped(both, &none, &plain(70_000, 1), |stats| stats.tx_too_long);
            driver.check_guards();
        },
    );
}

#[test]
fn jumbo_frames_pass_both_ways() {
    isolated("jumbo_frames_pass_both_ways", || {
        let network = Network::new(&Setup {
            mtu: Some(9000),
            ..Setup::default()
        });
        let mut driver = network.attach(F_MTU);
        let mut config = [0; 12];
        driver.frontend.read_config(0, &mut config).unwrap();
        assert_eq!(config, [0x52, 0x54, 0, 0, 0, 2, 1, 0, 1, 0, 0x28, 0x23]);
        let frame = plain(9014, 7);
        driver.send(0, &Header::default(), &frame, &[12]);
        assert_eq!(network.receive().1, frame);
        driver.post(0, &[9200]);
        network.send(&Header::default(), &frame);
        assert_eq!(driver.receive(0).1, frame);
        driver.check_guards();
    });
}

#[test]
fn a_frame_in_very_many_pieces_passes() {
    isolated("a_frame_in_very_many_pieces_passes", || {
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(0);
        // As many pieces as the queue has descriptors.
        let frame = plain(600, 3);
        driver.send(0, &Header::default(), &frame, &[2; 250]);
        driver.wait_sent(0);
        assert_eq!(network.receive().1, frame);
    });
}
