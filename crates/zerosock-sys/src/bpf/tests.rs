//! Maps and programs on the running kernel. They need CAP_BPF and CAP_NET_ADMIN: without, the tests say
//! SKIPPED. The behaviour of redirected sockets is tested with `zerosock_relay::sockmap`.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;

use super::*;

/// Unwraps, or skips the test where the machine does not permit it.
macro_rules! or_skip {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(error @ (BpfError::Denied { .. } | BpfError::NotSupported { .. })) => {
                let name = std::thread::current().name().unwrap_or_default().to_owned();
                println!("SKIPPED {name}: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
    };
}

struct Maps {
    numbers: NumberByCookie,
    slots: Slots,
    targets: SockMap,
}

impl Maps {
    fn create(entries: u32) -> Result<Maps, BpfError> {
        Ok(Maps {
            numbers: NumberByCookie::create(entries)?,
            slots: Slots::create(entries)?,
            targets: SockMap::create(entries)?,
        })
    }

    fn verdict(&self) -> VerdictMaps<'_> {
        VerdictMaps {
            numbers: &self.numbers,
            slots: &self.slots,
            targets: &self.targets,
        }
    }
}

#[test]
fn verifier_accepts_both_programs() {
    let maps = or_skip!(Maps::create(4));
    Program::load(maps.verdict(), ArrivalSocket::Any).unwrap();
    Program::load(maps.verdict(), ArrivalSocket::Only(u64::MAX)).unwrap();
}

#[test]
fn rejected_program_comes_with_the_verifiers_log() {
    or_skip!(Maps::create(1));
    // The result is never set.
    let end = calls::Instruction {
        code: 0x95,
        registers: 0,
        offset: 0,
        immediate: 0,
    };
    let rejected = calls::load(calls::ProgramKind::Verdict, &[end], c"Dual MIT/GPL");
    let rejected = rejected.err().unwrap();
    assert!(rejected.log.contains("R0 !read_ok"), "{}", rejected.log);
}

#[test]
fn map_of_sockets_refuses_what_cannot_be_redirected() {
    let map = or_skip!(SockMap::create(2));
    let error = |result: std::io::Result<()>| result.unwrap_err().raw_os_error();
    let (reader, _writer) = std::io::pipe().unwrap();
    assert_eq!(error(map.insert(0, reader)), Some(libc::ENOTSOCK));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    map.insert(0, &near).unwrap();
    assert_eq!(error(map.insert(2, &near)), Some(libc::E2BIG));
    map.remove(0).unwrap();
    assert_eq!(error(map.remove(0)), Some(libc::EINVAL));
    // A socket that closes leaves the map.
    map.insert(1, &near).unwrap();
    drop(near);
    assert_eq!(error(map.remove(1)), Some(libc::EINVAL));
    drop(far);
    let unconnected = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    );
    let refused = error(map.insert(0, unconnected.unwrap()));
    assert_eq!(refused, Some(libc::EOPNOTSUPP));
}

#[test]
fn sockets_of_each_kind_can_be_inserted() {
    let map = or_skip!(SockMap::create(2));
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    udp.connect(udp.local_addr().unwrap()).unwrap();
    map.insert(0, &udp).unwrap();
    let (stream, _other) = UnixStream::pair().unwrap();
    map.insert(0, &stream).unwrap();
    let (datagram, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    map.insert(0, &datagram).unwrap();
}

#[test]
fn slots_are_shared_with_the_kernel() {
    let slots = or_skip!(Slots::create(3));
    assert_eq!(slots.entries(), 3);
    assert!(slots.get(3).is_none());
    slots.get(2).unwrap().allowance.store(7, Relaxed);
    assert_eq!(slots.get(2).unwrap().allowance.load(Relaxed), 7);
    assert_eq!(slots.get(1).unwrap().allowance.load(Relaxed), 0);
}

/// A thread that has dropped its capabilities can create nothing and is told why, but uses what was
/// made before.
#[test]
fn capabilities_are_needed_for_set_up_only() {
    let maps = or_skip!(Maps::create(2));
    let program = or_skip!(Program::load(maps.verdict(), ArrivalSocket::Any));
    let sources = or_skip!(Sources::create(2, program));
    std::thread::spawn(move || {
        drop_bpf_capabilities().unwrap();
        let error = SockMap::create(1).unwrap_err().to_string();
        assert!(
            error.contains("not permitted without CAP_BPF and CAP_NET_ADMIN"),
            "{error}"
        );
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        sources.map().insert(1, &udp).unwrap();
        maps.numbers.insert(1, 1).unwrap();
        maps.numbers.remove(1).unwrap();
        sources.map().remove(1).unwrap();
    })
    .join()
    .unwrap();
}
