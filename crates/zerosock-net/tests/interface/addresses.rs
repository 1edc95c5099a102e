//! Leases and loans lie in shared memory: seen by their addresses, and by bytes that change under them
//! when the file behind the memory is written.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

use zerosock_net::interface::{InterfaceConfig, Repr, Trust};

use super::exchange::frame;
use super::lan::{DEADLINE, Lan, mac, receive};

/// The file of interfaces' memory behind an address of this process, and the offset in it.
#[track_caller]
fn shared_file(address: usize) -> (File, u64) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (start, end) = words.next().unwrap().split_once('-').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        let (start, end) = (number(start), number(end));
        if !(start..end).contains(&address) {
            continue;
        }
        let offset = number(words.nth(1).unwrap());
        let inode: u64 = words.nth(1).unwrap().parse().unwrap();
        let name = words.next().unwrap_or_default();
        assert!(name.contains("memfd:zerosock-interface"), "{line}");
        for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
            let path = entry.unwrap().path();
            let is_it = |target: std::path::PathBuf| {
                target
                    .to_string_lossy()
                    .contains("memfd:zerosock-interface")
            };
            if std::fs::read_link(&path).is_ok_and(is_it)
                && let Ok(file) = OpenOptions::new().write(true).open(&path)
                && file.metadata().unwrap().ino() == inode
            {
                return (file, (address - start + offset) as u64);
            }
        }
        panic!("no descriptor of {line}");
    }
    panic!("{address:#x} is not mapped");
}

#[test]
fn a_lease_lies_in_the_memory_that_the_device_writes() {
    let lan = Lan::new(&[None; 2]);
    let config = InterfaceConfig::default();
    let (a, b) = (lan.connect(0, &config), lan.connect(1, &config));
    // In three buffers.
    let sent = frame(mac(1), mac(0), 5000, 1);
    let mut loan = a.loan(sent.len()).unwrap();
    shared_file(loan.slice().as_ptr().addr());
    loan.write(0, &sent);
    loan.queue(&Repr::PLAIN).unwrap();
    a.flush();
    let lease = receive(&b);
    assert_eq!(lease.to_vec(), sent);
    let mut at = 0;
    for slice in lease.slices() {
        let (file, offset) = shared_file(slice.as_ptr().addr());
        let (first, last) = (at, at + slice.len() - 1);
        for place in [first, last] {
            let changed = sent[place] ^ 0x5a;
            file.write_at(&[changed], offset + (place - at) as u64)
                .unwrap();
            let mut byte = [0];
            lease.read(place, &mut byte);
            assert_eq!(byte, [changed], "the lease is a copy at {place}");
        }
        at += slice.len();
    }
    assert_eq!(at, sent.len());
}

#[test]
fn a_queued_loan_lies_in_the_memory_that_the_device_reads() {
    let lan = Lan::new(&[None; 2]);
    let config = InterfaceConfig {
        rx_queue_size: 8,
        ..InterfaceConfig::default()
    };
    let (a, b) = (lan.connect(0, &config), lan.connect(1, &config));
    let send = |seed| {
        let sent = frame(mac(1), mac(0), 200, seed);
        let mut loan = a.loan(sent.len()).unwrap();
        loan.write(0, &sent);
        let address = loan.slice().as_ptr().addr();
        loan.queue(&Repr::PLAIN).unwrap();
        a.flush();
        (sent, address)
    };
    let end = Instant::now() + DEADLINE;
    loop {
        assert!(Instant::now() < end, "all frames have waited for too long");
        // The receiver has no buffers, so that the next frame stays with its sender.
        let mut leases = Vec::new();
        while leases.len() < 8 {
            send(1);
            let next = Instant::now() + Duration::from_millis(500);
            b.wait(Some(next)).unwrap();
            leases.extend(std::iter::from_fn(|| b.recv()));
        }
        leases.truncate(8);
        let (sent, address) = send(2);
        // The device has looked at the queue when it answers.
        a.link_is_up().unwrap();
        let (file, offset) = shared_file(address);
        let mut changed = sent.clone();
        changed[100] ^= 0x5a;
        file.write_at(&changed[100..101], offset + 100).unwrap();
        drop(leases);
        assert!(b.recv().is_none());
        // A frame that has waited for 20 ms is dropped. Others may be those of before.
        let next = Instant::now() + Duration::from_millis(500);
        b.wait(Some(next)).unwrap();
        let received = std::iter::from_fn(|| b.recv()).map(|lease| lease.to_vec());
        let received: Vec<_> = received
            .filter(|bytes| bytes[20..] != frame(mac(1), mac(0), 200, 1)[20..])
            .collect();
        if let Some(last) = received.last() {
            assert!(*last == changed || *last == sent);
            if *last == changed {
                return;
            }
        }
    }
}

#[test]
fn with_trust_leases_and_loans_are_plain_slices_in_place() {
    let lan = Lan::new(&[None; 2]);
    let config = InterfaceConfig {
        // SAFETY: the device is the switch of this process, which writes a buffer only while it has
        // it. The memory is sealed. No other process has it, and this test writes no lease.
        trust: Some(unsafe { Trust::declare() }),
        ..InterfaceConfig::default()
    };
    let (a, b) = (lan.connect(0, &config), lan.connect(1, &config));
    for seed in 0..50 {
        let sent = frame(mac(1), mac(0), 1000, seed);
        let mut loan = a.loan(sent.len()).unwrap();
        let address = loan.slice().as_ptr().addr();
        let bytes = loan.bytes_mut().unwrap();
        assert_eq!(bytes.as_ptr().addr(), address);
        bytes.copy_from_slice(&sent);
        loan.queue(&Repr::PLAIN).unwrap();
        a.flush();
        let lease = receive(&b);
        let bytes = lease.bytes().unwrap();
        assert_eq!(bytes, sent);
        assert_eq!(bytes.as_ptr().addr(), lease.first().as_ptr().addr());
        shared_file(bytes.as_ptr().addr());
    }
    // Several buffers are no slice.
    let sent = frame(mac(1), mac(0), 5000, 1);
    let mut loan = a.loan(sent.len()).unwrap();
    loan.bytes_mut().unwrap().copy_from_slice(&sent);
    loan.queue(&Repr::PLAIN).unwrap();
    a.flush();
    assert!(receive(&b).bytes().is_none());
}
