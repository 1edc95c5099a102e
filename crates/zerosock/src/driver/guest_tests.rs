//! A driver on memory that it was given: how much it needs, what it asks the device for, and which devices it refuses.

use std::os::unix::net::UnixStream;

use zerosock_proto::Cid;
use zerosock_proto::vsock::datagram::{F_DGRAM, F_DGRAM_FLOW};
use zerosock_proto::vsock::features::F_PAIRS;
use zerosock_ring::DriverLayout;
use zerosock_sys::memfd::{self, HUGE_PAGE};
use zerosock_virtio::{F_EVENT_IDX, F_VERSION_1};

use super::*;
use crate::driver::guest_device::FEATURES;
use crate::fault::Fault;

fn config() -> DriverConfig {
    DriverConfig {
        queue_pairs: 4,
        ..DriverConfig::default()
    }
}

/// A device with these features and this CID, and the other end of its doorbell.
fn device(features: u64, cid: u32) -> (GuestDevice, UnixStream) {
    let (doorbell, theirs) = UnixStream::pair().unwrap();
    let len = config().memory_len().unwrap();
    let device = GuestDevice {
        memory: memfd::create("guest", len, true).unwrap(),
        doorbell: doorbell.into(),
        features,
        cid: Cid::new(cid),
    };
    (device, theirs)
}

fn attach(
    (device, _theirs): (GuestDevice, UnixStream),
    config: DriverConfig,
    start: impl FnOnce(&Start) -> u64,
) -> Result<Driver, DriverAttachError> {
    Driver::attach_guest(device, config, |request| Ok(start(request)))
}

#[test]
fn every_setting_in_its_range_has_room_in_huge_pages() {
    let largest = DriverConfig {
        queue_size: 32768,
        queue_pairs: 16,
        rx_buffer_size: 1 << 20,
        tx_buffer_size: 65536,
        ..DriverConfig::default()
    };
    let len = largest.memory_len().unwrap();
    assert!(len.is_multiple_of(HUGE_PAGE) && len > 16384 << 20, "{len}");
    // The buffers of one pair, whatever else is configured.
    let one = DriverConfig::default().memory_len().unwrap();
    assert_eq!(config().memory_len(), Ok(one));
    let bad = DriverConfig {
        queue_size: 100,
        ..DriverConfig::default()
    };
    assert_eq!(bad.memory_len(), Err(ConfigError::QueueSize(100)));
}

#[test]
fn the_start_names_accepted_features_and_rings_in_the_memory() {
    let offered = FEATURES | F_PAIRS | 1 << 40;
    let mut config = config();
    config.datagrams = false;
    let wanted = FEATURES & !(F_DGRAM | F_DGRAM_FLOW);
    let mut asked = None;
    let driver = attach(device(offered, 3), config, |start| {
        asked = Some(*start);
        start.features
    });
    let driver = driver.unwrap();
    let start = asked.unwrap();
    assert_eq!((start.features, start.queue_size), (wanted, 256));
    let len = DriverLayout::bytes_needed(256).next_multiple_of(4096);
    assert_eq!(start.rings, [0, len, 2 * len]);
    assert_eq!((driver.queue_pairs(), driver.cid()), (1, Cid::new(3)));
    assert!(!driver.huge_pages());
}

#[test]
fn bad_devices_are_refused() {
    let refused = |features, cid, change| {
        let start = |start: &Start| start.features ^ change;
        let error = attach(device(features, cid), config(), start).unwrap_err();
        assert_eq!(error.fault(), Fault::Peer, "{error}");
        error.to_string()
    };
    assert!(refused(FEATURES & !F_VERSION_1, 3, 0).contains("VERSION_1"));
    assert!(refused(FEATURES, 2, 0).contains("CID"));
    // Fewer features than were accepted, and one that was not.
    for change in [F_EVENT_IDX, 1 << 40] {
        assert!(refused(FEATURES, 3, change).contains("accepted"));
    }
}

#[test]
fn the_error_of_the_start_is_that_of_the_attach() {
    let (device, theirs) = device(FEATURES, 3);
    #[derive(Debug)]
    struct Refused;
    impl From<DriverAttachError> for Refused {
        fn from(error: DriverAttachError) -> Refused {
            panic!("{error}");
        }
    }
    let Refused = Driver::attach_guest(device, config(), |_| Err(Refused)).unwrap_err();
    drop(theirs);
}
