//! bpf(2), one function for each command that is used.

use std::ffi::{CStr, c_int, c_long};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Commands of bpf(2).
const MAP_CREATE: c_int = 0;
const MAP_UPDATE_ELEM: c_int = 2;
const MAP_DELETE_ELEM: c_int = 3;
const PROG_LOAD: c_int = 5;
const PROG_ATTACH: c_int = 8;
const PROG_DETACH: c_int = 9;
const LINK_CREATE: c_int = 28;

/// BPF_SK_SKB_VERDICT: for sockets of any protocol, from Linux 5.13 on.
const SK_SKB_VERDICT: u32 = 38;
/// BPF_XDP.
const XDP: u32 = 37;

/// Kinds of programs.
#[derive(Copy, Clone, Debug)]
pub(crate) enum ProgramKind {
    /// Verdicts on packets of sockets.
    Verdict,
    /// Frames that a network interface has received.
    Xdp,
}

impl ProgramKind {
    /// The type of program and how it is attached.
    fn numbers(self) -> (u32, u32) {
        match self {
            // BPF_PROG_TYPE_SK_SKB.
            ProgramKind::Verdict => (14, SK_SKB_VERDICT),
            // BPF_PROG_TYPE_XDP.
            ProgramKind::Xdp => (6, XDP),
        }
    }
}

/// Length of the verifier's log, in bytes.
const LOG: usize = 64 << 10;

/// Kinds of maps.
#[derive(Copy, Clone, Debug)]
pub(crate) enum MapKind {
    /// BPF_MAP_TYPE_HASH.
    Hash = 1,
    /// BPF_MAP_TYPE_ARRAY.
    Array = 2,
    /// BPF_MAP_TYPE_SOCKMAP.
    SockMap = 15,
    /// BPF_MAP_TYPE_XSKMAP.
    XskMap = 17,
}

/// BPF_F_MMAPABLE: the values of an array can be mapped into this process.
pub(crate) const MAPPABLE: u32 = 1 << 10;

/// One instruction of eBPF (`struct bpf_insn`).
#[repr(C)]
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Instruction {
    pub(crate) code: u8,
    /// The destination in the low four bits, the source in the high ones.
    pub(crate) registers: u8,
    pub(crate) offset: i16,
    pub(crate) immediate: i32,
}

/// The part of `union bpf_attr` for MAP_CREATE, up to `map_name`.
#[repr(C)]
struct CreateMap {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner_map: u32,
    numa_node: u32,
    name: [u8; 16],
}

/// That for the commands on elements.
#[repr(C)]
struct Element {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// That for PROG_LOAD, up to `expected_attach_type`.
#[repr(C)]
struct LoadProgram {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    expected_attach_type: u32,
}

/// That for PROG_ATTACH and PROG_DETACH, up to `attach_flags`.
#[repr(C)]
struct Attach {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

/// That for LINK_CREATE, up to `flags`.
#[repr(C)]
struct CreateLink {
    program: u32,
    interface: u32,
    attach_type: u32,
    flags: u32,
}

/// Creates a map.
pub(crate) fn create_map(
    kind: MapKind,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    let attribute = CreateMap {
        kind: kind as u32,
        key_size,
        value_size,
        max_entries,
        flags,
        inner_map: 0,
        numa_node: 0,
        name: *b"zerosock\0\0\0\0\0\0\0\0",
    };
    // SAFETY: MAP_CREATE takes no addresses.
    let created = unsafe { bpf(MAP_CREATE, &attribute) }?;
    // SAFETY: the kernel has just returned this descriptor, so it is open and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(created) })
}

/// Sets the value of a key. `K` and `V` have the sizes with which the map was created, which is the
/// caller's duty: the kernel reads as many bytes.
///
/// # Safety
/// `size_of::<K>()` and `size_of::<V>()` are at least the sizes of keys and values of `map`.
pub(crate) unsafe fn set<K: Copy, V: Copy>(map: &OwnedFd, key: K, value: V) -> io::Result<()> {
    let attribute = Element {
        map: number(map.as_fd()),
        padding: 0,
        key: address(&key),
        value: address(&value),
        flags: 0,
    };
    // SAFETY: the kernel reads one key and one value, which are as large as the caller has promised
    // and outlive the call.
    unsafe { bpf(MAP_UPDATE_ELEM, &attribute) }?;
    Ok(())
}

/// Removes a key.
///
/// # Safety
/// `size_of::<K>()` is at least the size of keys of `map`.
pub(crate) unsafe fn remove<K: Copy>(map: &OwnedFd, key: K) -> io::Result<()> {
    let attribute = Element {
        map: number(map.as_fd()),
        padding: 0,
        key: address(&key),
        value: 0,
        flags: 0,
    };
    // SAFETY: the kernel reads one key, which is as large as the caller has promised and outlives
    // the call.
    unsafe { bpf(MAP_DELETE_ELEM, &attribute) }?;
    Ok(())
}

/// Why a program was not loaded.
pub(crate) struct Rejected {
    pub(crate) error: io::Error,
    /// What the verifier has to say; empty if the program did not get that far.
    pub(crate) log: String,
}

/// Loads a program.
pub(crate) fn load(
    kind: ProgramKind,
    instructions: &[Instruction],
    license: &CStr,
) -> Result<OwnedFd, Rejected> {
    let (kind, expected_attach_type) = kind.numbers();
    let load = |log: &mut [u8]| -> io::Result<OwnedFd> {
        let attribute = LoadProgram {
            kind,
            instruction_count: instructions.len() as u32,
            instructions: instructions.as_ptr() as u64,
            license: license.as_ptr() as u64,
            log_level: u32::from(!log.is_empty()),
            log_size: log.len() as u32,
            log: if log.is_empty() {
                0
            } else {
                log.as_mut_ptr() as u64
            },
            kernel_version: 0,
            flags: 0,
            name: *b"zerosock\0\0\0\0\0\0\0\0",
            interface: 0,
            expected_attach_type,
        };
        // SAFETY: the kernel reads `instruction_count` instructions and a string that ends with a
        // zero byte, and writes at most `log_size` bytes to `log`; all outlive the call, and `log`
        // is borrowed mutably for it.
        let loaded = unsafe { bpf(PROG_LOAD, &attribute) }?;
        // SAFETY: as in `create_map`.
        Ok(unsafe { OwnedFd::from_raw_fd(loaded) })
    };
    load(&mut []).or_else(|error| {
        // Once more, for the log: the kernel does not keep it.
        let mut log = vec![0; LOG];
        match load(&mut log) {
            Ok(program) => Ok(program),
            Err(_) => {
                let len = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
                let log = String::from_utf8_lossy(&log[..len]).trim().to_owned();
                Err(Rejected { error, log })
            }
        }
    })
}

/// Attaches a verdict program to a map of sockets.
pub(crate) fn attach(program: BorrowedFd<'_>, map: BorrowedFd<'_>) -> io::Result<()> {
    attach_or_detach(PROG_ATTACH, program, map)
}

/// Detaches it.
pub(crate) fn detach(program: BorrowedFd<'_>, map: BorrowedFd<'_>) -> io::Result<()> {
    attach_or_detach(PROG_DETACH, program, map)
}

fn attach_or_detach(
    command: c_int,
    program: BorrowedFd<'_>,
    map: BorrowedFd<'_>,
) -> io::Result<()> {
    let attribute = Attach {
        target: number(map),
        program: number(program),
        kind: SK_SKB_VERDICT,
        flags: 0,
    };
    // SAFETY: both commands take no addresses.
    unsafe { bpf(command, &attribute) }?;
    Ok(())
}

/// Attaches an XDP program to a network interface. The program is detached when the descriptor that is
/// returned is closed. `flags` are those of XDP (`XDP_FLAGS_DRV_MODE` and so on).
pub(crate) fn attach_xdp(
    program: BorrowedFd<'_>,
    interface: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    let attribute = CreateLink {
        program: number(program),
        interface,
        attach_type: XDP,
        flags,
    };
    // SAFETY: LINK_CREATE takes no addresses for this type.
    let created = unsafe { bpf(LINK_CREATE, &attribute) }?;
    // SAFETY: as in `create_map`.
    Ok(unsafe { OwnedFd::from_raw_fd(created) })
}

/// The number of a descriptor as bpf(2) takes it. Open descriptors are not negative.
pub(crate) fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}

fn address<T>(value: &T) -> u64 {
    std::ptr::from_ref(value) as u64
}

/// # Safety
/// `attribute` is what `command` takes, and the addresses in it are valid for the accesses of the
/// kernel.
unsafe fn bpf<T>(command: c_int, attribute: &T) -> io::Result<c_int> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of `attribute`, and what the caller answers for.
    // It takes a shorter attribute than its own as one with zeroes at the end.
    let result: c_long = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attribute),
            size_of::<T>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result as c_int)
}
