//! Memory and interfaces that cannot be used.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use zerosock_net::xdp::{XdpBackend, XdpConfig};
use zerosock_proto::wire::net::F_MRG_RXBUF;
use zerosock_sys::xdp::{InterfaceOptions, XdpError, XdpInterface};
use zerosock_vhost_user::frontend::FrontendError;

use super::super::driver::Driver;
use super::super::frames::plain;
use super::super::network::LIMITS;
use super::link::{BUFFER, CONFIG, Link, backend, isolated, name, open};

/// Without enough locked memory for the guest, but for private memory, all frames are copied.
#[test]
fn without_locked_memory_frames_are_copied_or_the_start_fails() {
    isolated("without_locked_memory", || {
        let maximum = getrlimit(Resource::Memlock).maximum;
        let limit = |bytes| {
            // Other tests of this process have CAP_IPC_LOCK, or they would be skipped.
            let current = Some(bytes);
            setrlimit(Resource::Memlock, Rlimit { current, maximum }).unwrap();
        };
        let mut sets = capabilities(None).unwrap();
        sets.effective -= CapabilitySet::IPC_LOCK;
        set_capabilities(None, sets).unwrap();

        limit(1 << 20);
        let error = XdpBackend::new(open(InterfaceOptions::default()), CONFIG).unwrap_err();
        assert!(matches!(error, XdpError::MemoryLock { .. }), "{error}");
        assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");

        limit(8 << 20);
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = link.attach(F_MRG_RXBUF);
        let before = link.settled(&mut driver);
        for seed in 0..100 {
            link.post(&mut driver, &[BUFFER]);
            link.send(&plain(500, seed));
            assert_eq!(driver.receive(0).1, plain(500, seed));
            link.check_sent(&mut driver, &plain(500, seed), &[]);
        }
        let after = link.settled(&mut driver);
        assert_eq!(after.rx_copied - before.rx_copied, 50_000);
        assert_eq!(after.tx_copied - before.tx_copied, 50_000);
        driver.check_guards();
    });
}

/// The memory has a hole when the queues start.
#[test]
fn memory_that_could_not_be_registered_is_tried_again() {
    isolated("memory_that_could_not_be_registered", || {
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = Driver::connect(&link.socket, F_MRG_RXBUF, 2);
        driver.grow(1 << 20);
        driver.send_memory();
        driver.frontend.sync().unwrap();
        driver.truncate(0);
        driver.start_all();
        link.wait_for_link(&mut driver);
        for seed in 0..20 {
            let before = link.settled(&mut driver).tx_copied;
            link.check_sent(&mut driver, &plain(500, seed), &[]);
            assert_eq!(link.settled(&mut driver).tx_copied - before, 500);
        }
        driver.truncate(1 << 20);
        link.wait_for_memory(&mut driver);
        link.wait_in_place(&mut driver);
        driver.check_guards();
    });
}

/// The limit of the front-end (`--max-memory`) holds before anything is allocated for it.
#[test]
fn memory_beyond_the_limit_is_refused_before_it_is_allocated() {
    isolated("memory_beyond_the_limit_is_refused", || {
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = link.attach_in_place(F_MRG_RXBUF);
        driver.grow(64 << 20);
        driver.send_memory();
        link.wait_in_place(&mut driver);
        assert_eq!(driver.allocated(), 64 << 20);
        driver.grow(LIMITS.mapped);
        let result = driver.try_send_memory();
        assert!(
            matches!(result, Err(FrontendError::Refused { .. })),
            "{result:?}"
        );
        // The memory is as before.
        link.check_in_place(&mut driver);
        assert_eq!(driver.allocated(), 0);
    });
}

#[test]
fn queues_that_cannot_be_used_are_refused_by_name() {
    isolated("queues_that_cannot_be_used_are_refused_by_name", || {
        let config = XdpConfig { queue: 7, ..CONFIG };
        let error = XdpBackend::new(open(InterfaceOptions::default()), config).unwrap_err();
        assert!(matches!(error, XdpError::NoQueue { queue: 7 }), "{error}");
        let _first = backend(InterfaceOptions::default(), CONFIG);
        let error = XdpInterface::open(&name("near"), InterfaceOptions::default()).unwrap_err();
        assert!(matches!(error, XdpError::Attached), "{error}");
    });
}
