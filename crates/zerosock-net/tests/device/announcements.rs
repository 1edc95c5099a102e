//! Guests that have moved: announcements by the device and by the driver, the MTU of a front-end, and
//! features that a device does not have.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use zerosock_net::backend::{Backend, Frame, FrameError, Never, Sent};
use zerosock_net::model::{ALL_OFFLOADS, NetModel};
use zerosock_net::stats::NetStats;
use zerosock_net::tap::TapBackend;
use zerosock_proto::Instant;
use zerosock_proto::wire::net::{
    CONTROL_ERR, CONTROL_OK, Config, F_CSUM, F_CTRL_VQ, F_GUEST_ANNOUNCE, F_GUEST_CSUM,
    F_GUEST_TSO4, F_HOST_TSO4, F_MRG_RXBUF, F_MTU, F_STATUS, Header, Offloads,
};
use zerosock_ring::GuestSlice;
use zerosock_sys::account::Budget;
use zerosock_sys::notify::ThreadCount;
use zerosock_sys::tun::Tap;
use zerosock_vhost_user::ProtocolFeatures;
use zerosock_vhost_user::codec::Message;
use zerosock_vhost_user::frontend::FrontendError;
use zerosock_vhost_user::session::{F_VERSION_1, Session};
use zerosock_virtio::outbox::Outbox;

use super::driver::{Driver, PROTOCOL};
use super::frames::{MARK, plain};
use super::network::{DEADLINE, Network, Setup, isolated, serve, wait_until};

const ANNOUNCES: u64 = F_GUEST_ANNOUNCE | F_STATUS | F_CTRL_VQ;
const ACKNOWLEDGE: [u8; 2] = [3, 0];
/// Status in the configuration space: the link is up.
const UP: [u8; 2] = [1, 0];
/// The same, and the driver is to announce itself.
const ANNOUNCE: [u8; 2] = [3, 0];

/// A RARP request of this address for itself (RFC 903).
pub(crate) fn rarp(mac: [u8; 6]) -> Vec<u8> {
    let mut frame = [&[0xff; 6], &mac[..], &[0x80, 0x35]].concat();
    frame.extend([0, 1, 8, 0, 6, 4, 0, 3]);
    for _ in 0..2 {
        frame.extend(mac);
        frame.extend([0; 4]);
    }
    frame.resize(60, 0);
    frame
}

fn is_refused<T>(result: Result<T, FrontendError>) -> bool {
    matches!(result, Err(FrontendError::Refused { .. }))
}

#[test]
fn the_device_broadcasts_where_the_guest_is() {
    isolated("the_device_broadcasts_where_the_guest_is", || {
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(F_MRG_RXBUF | ALL_OFFLOADS);
        for refused in [[0; 6], [0xff; 6], [1, 0, 0x5e, 0, 0, 1]] {
            assert!(
                is_refused(driver.frontend.send_rarp(refused)),
                "{refused:x?}"
            );
        }
        for count in 1..4 {
            driver.frontend.send_rarp(MARK).unwrap();
            assert_eq!(network.receive(), (Header::default(), rarp(MARK)));
            // The guest's frames go on.
            driver.send(0, &Header::default(), &plain(60, 1), &[]);
            assert_eq!(network.receive().1, plain(60, 1));
            wait_until("counted", || network.stats().announcements == count);
        }
        network.tap.bring_down().unwrap();
        assert!(is_refused(driver.frontend.send_rarp(MARK)));
    });
}

/// The channel on which the device notifies of its configuration space.
fn open_channel(frontend: &mut zerosock_vhost_user::frontend::Frontend) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let protocol = PROTOCOL | ProtocolFeatures::BACKEND_REQ;
    frontend.set_protocol_features(protocol).unwrap();
    frontend.set_backend_channel(theirs.as_fd()).unwrap();
    ours.set_read_timeout(Some(DEADLINE)).unwrap();
    ours
}

fn status(driver: &mut Driver) -> [u8; 2] {
    driver.config()[Config::STATUS].try_into().unwrap()
}

#[test]
fn a_driver_that_has_moved_is_asked_to_announce_itself_once() {
    isolated(
        "a_driver_that_has_moved_is_asked_to_announce_itself_once",
        || {
            let network = Network::new(&Setup::default());
            let mut driver = Driver::attach(&network.socket, ANNOUNCES, 3);
            // It has begun here.
            assert_eq!(status(&mut driver), UP);
            assert_eq!(driver.command(2, &ACKNOWLEDGE), CONTROL_ERR);
            for frames in [false, true] {
                if frames {
                    network.wait_for_link(&mut driver);
                }
                let mut channel = None;
                driver.move_to(&network.socket, |frontend| {
                    channel = Some(open_channel(frontend));
                });
                let mut channel = channel.unwrap();
                let mut message = [0; 12];
                channel.read_exact(&mut message).unwrap();
                // CONFIG_CHANGE_MSG of version 1, without a payload.
                assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
                assert_eq!(status(&mut driver), ANNOUNCE);
                network.wait_for_link(&mut driver);
                driver.send(0, &Header::default(), &plain(60, 1), &[]);
                driver.wait_sent(0);
                assert_eq!(driver.command(2, &ACKNOWLEDGE), CONTROL_OK);
                assert_eq!(status(&mut driver), UP);
                assert_eq!(driver.command(2, &ACKNOWLEDGE), CONTROL_ERR);
                // A queue that stops and continues here has not moved.
                let base = driver.frontend.get_vring_base(0).unwrap();
                driver.start(0, base);
                assert_eq!(status(&mut driver), UP);
                channel.set_nonblocking(true).unwrap();
                let nothing = channel.read(&mut message).unwrap_err();
                assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
            }
            // The driver resets the device before it has announced itself.
            driver.move_to(&network.socket, |_| {});
            assert_eq!(status(&mut driver), ANNOUNCE);
            driver.frontend.reset_device().unwrap();
            assert_eq!(status(&mut driver), UP);
            driver.forget();
            driver.start_all();
            assert_eq!(driver.command(2, &ACKNOWLEDGE), CONTROL_ERR);
            driver.check_guards();
        },
    );
}

#[test]
fn a_driver_that_does_not_announce_itself_is_not_asked() {
    isolated(
        "a_driver_that_does_not_announce_itself_is_not_asked",
        || {
            let network = Network::new(&Setup::default());
            // Without the feature, and where the front-end keeps the control queue.
            for (features, queues) in [(F_STATUS | F_CTRL_VQ, 3), (F_STATUS | F_GUEST_ANNOUNCE, 2)]
            {
                let mut driver = Driver::attach(&network.socket, features, queues);
                network.wait_for_link(&mut driver);
                driver.move_to(&network.socket, |_| {});
                assert_eq!(status(&mut driver), UP);
                network.wait_for_link(&mut driver);
            }
        },
    );
}

#[test]
fn an_mtu_of_the_front_end_bounds_the_frames_of_its_guest() {
    isolated(
        "an_mtu_of_the_front_end_bounds_the_frames_of_its_guest",
        || {
            let network = Network::new(&Setup {
                mtu: Some(9000),
                ..Setup::default()
            });
            let mtu = |driver: &mut Driver| {
                let bytes: [u8; 2] = driver.config()[Config::MTU].try_into().unwrap();
                u16::from_le_bytes(bytes)
            };
            let mut driver = network.attach(F_MTU);
            for refused in [0, 67, 9001, 0x1_0000 + 1500] {
                assert!(is_refused(driver.frontend.set_mtu(refused)), "{refused}");
            }
            assert_eq!(mtu(&mut driver), 9000);
            driver.frontend.set_mtu(2000).unwrap();
            assert_eq!(mtu(&mut driver), 2000);
            driver.send(0, &Header::default(), &plain(2014, 1), &[]);
            assert_eq!(network.receive().1, plain(2014, 1));
            driver.send(0, &Header::default(), &plain(2023, 1), &[]);
            wait_until("dropped", || network.stats().tx_too_long == 1);
            // It goes with the front-end.
            drop(driver);
            let mut driver = network.attach(F_MTU);
            assert_eq!(mtu(&mut driver), 9000);
            driver.send(0, &Header::default(), &plain(9014, 1), &[]);
            assert_eq!(network.receive().1, plain(9014, 1));
        },
    );
}

/// A device without an MTU leaves it to the front-end.
#[test]
fn any_valid_mtu_is_taken_where_the_interface_has_none() {
    isolated(
        "any_valid_mtu_is_taken_where_the_interface_has_none",
        || {
            let network = Network::new(&Setup::default());
            let mut driver = network.attach(F_MTU);
            assert!(is_refused(driver.frontend.set_mtu(67)));
            driver.frontend.set_mtu(68).unwrap();
            driver.frontend.set_mtu(65535).unwrap();
            driver.send(0, &Header::default(), &plain(1514, 1), &[]);
            assert_eq!(network.receive().1, plain(1514, 1));
        },
    );
}

/// A TAP without offloads.
struct Plain(TapBackend);

impl Backend for Plain {
    type Message = Never;

    fn queues(&self) -> u16 {
        self.0.queues()
    }

    fn features(&self) -> u64 {
        0
    }

    fn descriptor(&self, queue: usize) -> Option<BorrowedFd<'_>> {
        self.0.descriptor(queue)
    }

    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()> {
        self.0.set_offloads(offloads)
    }

    fn set_active(&mut self, queue: usize, active: bool) -> io::Result<()> {
        self.0.set_active(queue, active)
    }

    fn receive(
        &mut self,
        queue: usize,
        header: &mut Header,
        slices: &[GuestSlice<'_>],
        rest: &mut [u8],
    ) -> Result<usize, FrameError> {
        self.0.receive(queue, header, slices, rest)
    }

    fn send(
        &mut self,
        queue: usize,
        frame: &Frame<'_>,
        number: u64,
        now: Instant,
    ) -> Result<Sent, FrameError> {
        self.0.send(queue, frame, number, now)
    }

    fn on_message(&mut self, message: Never, _: Instant, _: &mut NetStats) -> bool {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }
}

#[test]
fn features_of_another_back_end_are_refused() {
    isolated("features_of_another_back_end_are_refused", || {
        let first = Network::new(&Setup::default());
        let tap = Tap::open(&"plain".parse().unwrap(), 1).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("net");
        let second = serve(&socket, None, Plain(TapBackend::new(tap).unwrap()));

        let offloads = F_CSUM | F_GUEST_CSUM | F_HOST_TSO4 | F_GUEST_TSO4;
        let driver = first.attach(F_MRG_RXBUF | offloads);
        let mut other = Driver::connect(&socket, F_MRG_RXBUF, 2);
        // As a front-end that restores what the driver has accepted.
        assert!(is_refused(other.frontend.set_features(driver.features)));
        other.frontend.set_status(11).unwrap();
        assert_eq!(other.frontend.get_status().unwrap(), 3, "no FEATURES_OK");
        other
            .frontend
            .set_features(driver.features & !offloads)
            .unwrap();
        // One that waits for no answer loses its connection.
        let mut message = [2_u32, 1, 8].map(u32::to_ne_bytes).concat();
        message.extend(driver.features.to_ne_bytes());
        other.frontend.send_raw(&message, &[]).unwrap();
        wait_until("disconnected", || other.frontend.is_closed());
        // The other way there is nothing to refuse: the features are a subset.
        drop(driver);
        let mut driver = Driver::attach(&socket, F_MRG_RXBUF, 2);
        driver.move_to(&first.socket, |_| {});
        first.wait_for_link(&mut driver);
        second.shutdown();
    });
}

#[test]
fn the_refusal_names_the_features() {
    let features = F_VERSION_1 | F_CSUM | F_HOST_TSO4 | F_MTU | 1 << 56;
    assert_eq!(
        refusal(0, features).unwrap(),
        "SET_FEATURES: features that were not offered: CSUM, MTU, HOST_TSO4, HOST_USO"
    );
}

/// Why a device with these offloads refuses features.
fn refusal(offloads: u64, features: u64) -> Option<String> {
    let model = NetModel {
        mac: None,
        mtu: None,
        max_mtu: None,
        pairs: 1,
        offloads,
    };
    let (account, threads) = (Budget::unlimited().account(), ThreadCount::default());
    let mut session = Session::new(Arc::new(model), 1024, account, &threads);
    let outcome = session.handle_message(Message {
        request: 2,
        need_reply: false,
        payload: features.to_ne_bytes().to_vec(),
        fds: Vec::new(),
        number: 0,
    });
    outcome.refusal.map(|refusal| refusal.text)
}

/// Its headers have 10 bytes (virtio 1.3, 5.1.6.1).
#[test]
fn a_legacy_driver_without_mergeable_buffers_is_refused_by_name() {
    const OF_FRONT_END: u64 = 1 << 26 | 1 << 30;
    for bits in [F_VERSION_1, F_MRG_RXBUF, F_VERSION_1 | F_MRG_RXBUF] {
        assert_eq!(refusal(ALL_OFFLOADS, bits | ALL_OFFLOADS), None);
    }
    for features in [F_CSUM, ALL_OFFLOADS, F_STATUS | OF_FRONT_END] {
        let text = refusal(ALL_OFFLOADS, features).unwrap();
        let wanted = "SET_FEATURES: a legacy driver without MRG_RXBUF: its headers have 10 bytes";
        assert!(text.starts_with(wanted), "{text}");
    }
    // There may be no driver yet.
    assert_eq!(refusal(ALL_OFFLOADS, OF_FRONT_END), None);
    assert_eq!(refusal(ALL_OFFLOADS, 0), None);
}

#[test]
fn no_queue_starts_for_a_driver_that_has_accepted_nothing() {
    isolated(
        "no_queue_starts_for_a_driver_that_has_accepted_nothing",
        || {
            let network = Network::new(&Setup::default());
            let mut driver = Driver::connect(&network.socket, 0, 2);
            assert!(is_refused(driver.frontend.set_features(F_CSUM)));
            driver.frontend.set_features(1 << 30).unwrap();
            driver.set_up(0, 0);
            assert!(is_refused(driver.send_kick(0)));
            driver.frontend.set_features(F_MRG_RXBUF | 1 << 30).unwrap();
            driver.start_all();
            network.wait_for_link(&mut driver);
        },
    );
}
