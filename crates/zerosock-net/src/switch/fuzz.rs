//! Entry points of the fuzz targets `frame` and `net_device` (docs/fuzzing.md): frames that are cut in software, and a
//! worker with the devices of two guests on a switch.

use std::sync::Arc;

use zerosock_proto::wire::net::{Checksum, Header, Mac, Offloads, Repr};
use zerosock_virtio::mailbox::Mailbox;
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::worker::Worker;

use super::copies::Copies;
use super::software::{convert, cut, is_accepted};
use super::{Switch, SwitchDevice, SwitchPort};
use crate::checksum::{IPV4, IPV6, add, complete_checksum, fold, network_header};
use crate::device::{BackendGoneEvent, Device, DeviceConfig};
use crate::tap::TapBackend;

/// Converts a frame for a receiver with these offloads. What it gets is announced by `cut`, accepted by the
/// receiver, and complete.
pub fn frame(header: Header, frame: &[u8], offloads: Offloads) {
    let (most, longest) = cut(&header, frame.len(), offloads);
    if is_accepted(&header, frame.len(), offloads) {
        return assert_eq!((most, longest), (1, frame.len()));
    }
    let mut out = Copies::default();
    if convert(&header, frame, offloads, &mut out).is_none() {
        return;
    }
    let original = Repr::parse(&header, frame.len(), Offloads::ALL);
    let original = original.expect("a frame that lies is not converted");
    assert!((1..=most).contains(&out.len()), "{} of {most}", out.len());
    let mut payload = Vec::new();
    while let Some((header, bytes)) = out.first() {
        assert!(bytes.len() <= longest);
        let plain = Repr::parse(header, bytes.len(), offloads);
        let plain = plain.expect("the receiver drops it");
        assert_eq!(plain.gso, None);
        if let (Some(_), Checksum::Partial { start, .. }) = (original.gso, original.checksum) {
            let start = usize::from(start);
            let headers = start + usize::from(bytes[start + 12] >> 4) * 4;
            payload.extend_from_slice(&bytes[headers..]);
            // With its pseudo header in the field, a segment has the sum of all ones when it is complete.
            let mut partial = bytes.to_vec();
            if let Checksum::Partial { start, offset } = plain.checksum {
                complete_checksum(&mut partial, start.into(), offset.into()).unwrap();
            }
            let pseudo = 6 + (bytes.len() - start) as u32;
            let addresses = match (network_header(bytes, IPV4), network_header(bytes, IPV6)) {
                (Some(ip), _) => &bytes[ip + 12..ip + 20],
                (_, Some(ip)) => &bytes[ip + 8..ip + 40],
                _ => panic!("segments without an address"),
            };
            let sum = add(add(pseudo, addresses), &partial[start..]);
            assert_eq!(fold(sum), 0xffff, "a wrong checksum");
        }
        out.pop();
    }
    if let (Some(_), Checksum::Partial { start, .. }) = (original.gso, original.checksum) {
        let start = usize::from(start);
        let headers = start + usize::from(frame[start + 12] >> 4) * 4;
        assert_eq!(payload, frame[headers..], "other payload");
    }
}

/// Devices 0 and 1, with these addresses. The first one may send from its own only.
pub fn switch_worker(macs: [Mac; 2]) -> Worker<SwitchDevice<TapBackend>> {
    let (sender, mailbox) = Mailbox::new().expect("a descriptor is left");
    let mut worker = Worker::new(0, vec![sender], mailbox, ()).expect("a descriptor is left");
    let gone = Arc::new(BackendGoneEvent::new().expect("a descriptor is left"));
    let switch = Switch::new();
    for (number, mac) in (0..).zip(macs) {
        let config = DeviceConfig {
            addr: DeviceAddr { worker: 0, number },
            name: format!("guest{number}"),
            mtu: None,
            only_mac: (number == 0).then_some(mac),
            counters: Arc::default(),
            gone: gone.clone(),
        };
        let port = SwitchPort::new(switch.clone(), Some(mac));
        let device = Device::new(config, port).expect("a port is left");
        worker.add(SwitchDevice::Port(Box::new(device)));
    }
    worker
}
