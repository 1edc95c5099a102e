//! Memory that cannot be the memory of a socket, and the limit of locked memory.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::ftruncate;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use zerosock_ring::{FlatError, MapError, Memory, RegionConfig};
use zerosock_sys::memfd;
use zerosock_sys::xdp::{Registered, Umem, XdpError};

use super::support::{Guest, SIZES, isolated};

fn map(file: impl AsFd, len: u64, fd_offset: u64) -> Result<Arc<Memory>, MapError> {
    let config = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len,
        fd_offset,
    };
    Memory::map(vec![(file, config)]).map(Arc::new)
}

fn register(memory: Arc<Memory>) -> Result<Registered, XdpError> {
    Registered::create(Umem::map(Some(memory), 0)?, SIZES)
}

#[test]
fn file_on_a_disk_is_refused() {
    isolated("file_on_a_disk_is_refused", || {
        let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        if memfd::is_memory(&file) {
            println!("SKIPPED file_on_a_disk_is_refused: the target directory is in memory");
            return;
        }
        file.set_len(65536).unwrap();
        let error = register(map(file, 65536, 0).unwrap()).unwrap_err();
        assert!(matches!(error, XdpError::NotPinnable), "{error}");
        assert!(error.to_string().contains("memfd"), "{error}");
    });
}

#[test]
fn truncated_file_is_refused() {
    isolated("truncated_file_is_refused", || {
        let file = memfd::create("guest", 65536, false).unwrap();
        let memory = map(&file, 65536, 0).unwrap();
        ftruncate(&file, 4096).unwrap();
        let error = register(memory).unwrap_err();
        assert!(matches!(error, XdpError::NoMemory), "{error}");
        assert!(error.to_string().contains("truncated"), "{error}");
    });
}

#[test]
fn memory_that_cannot_be_written_is_refused_when_it_is_mapped() {
    let path = format!("/proc/self/fd/{}", {
        use std::os::fd::AsRawFd;
        let file: OwnedFd = memfd::create("guest", 4096, true).unwrap();
        let number = file.as_raw_fd();
        std::mem::forget(file);
        number
    });
    let error = map(File::open(path).unwrap(), 4096, 0).unwrap_err();
    assert!(matches!(error, MapError::Map { .. }), "{error}");
}

#[test]
fn regions_of_incomplete_pages_are_refused() {
    for (len, offset) in [(4096 + 512, 0), (4096, 512)] {
        let file = memfd::create("guest", 16384, false).unwrap();
        let error = Umem::map(Some(map(file, len, offset).unwrap()), 0).unwrap_err();
        let unaligned = matches!(error, XdpError::Flat(FlatError::Unaligned { .. }));
        assert!(unaligned, "{error}");
    }
}

#[test]
fn memory_beyond_the_limit_of_locked_memory_is_refused() {
    isolated("memory_beyond_the_limit_of_locked_memory", || {
        let old = getrlimit(Resource::Memlock);
        let limit = 2 << 20;
        // The other tests of this process have CAP_IPC_LOCK, or they would be skipped.
        let new = Rlimit {
            current: Some(limit),
            maximum: old.maximum,
        };
        setrlimit(Resource::Memlock, new).unwrap();
        let mut sets = capabilities(None).unwrap();
        sets.effective -= CapabilitySet::IPC_LOCK;
        set_capabilities(None, sets).unwrap();

        let large = Guest::new(&[3 << 20]);
        let error = register(Arc::clone(&large.memory)).unwrap_err();
        let need = Umem::map(Some(large.memory), 0).unwrap().locked();
        let told = format!("locked memory needed: {need} bytes, limit {limit}");
        assert!(error.to_string().starts_with(&told), "{error}");

        // Each is below the limit, but not both together.
        let part = || Guest::new(&[1 << 20]).umem(200);
        assert!(part().locked() < limit && 2 * part().locked() > limit);
        let first = Registered::create(part(), SIZES).unwrap();
        let error = Registered::create(part(), SIZES).unwrap_err();
        assert!(matches!(error, XdpError::MemoryLock { .. }), "{error}");
        drop(first);
    });
}

#[test]
fn socket_without_capability_is_refused_by_name() {
    isolated("socket_without_capability_is_refused_by_name", || {
        let mut sets = capabilities(None).unwrap();
        sets.effective -= CapabilitySet::NET_RAW;
        set_capabilities(None, sets).unwrap();
        let error = Registered::create(Umem::map(None, 1).unwrap(), SIZES).unwrap_err();
        assert!(error.to_string().contains("CAP_NET_RAW"), "{error}");
    });
}
