//! Networks for tests: a thread in a network namespace of its own, TCP with kernel TLS, and packet
//! sockets.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::rtnetlink::{attribute, change_link};
use crate::socket_option::{check, set, set_int};
use crate::tun::InterfaceName;

const SOL_TLS: libc::c_int = 282;
const TLS_TX: libc::c_int = 1;
const TLS_RX: libc::c_int = 2;

/// Moves the calling thread into a new network namespace, with a loopback device that is down and
/// nothing else. Existing sockets stay in the old namespace; later sockets and child processes of
/// the thread are in the new one. The kernel removes the namespace with its last user.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN; ENOSPC if the limit of namespaces is reached.
pub fn isolate_thread() -> io::Result<()> {
    // SAFETY: the call affects later sockets of the calling thread, and touches no memory.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })
}

/// Has the kernel cut each send of a UDP socket into datagrams of `size` bytes (UDP_SEGMENT).
///
/// # Errors
/// ENOPROTOOPT before Linux 4.18.
pub fn set_segment_size(socket: impl AsFd, size: u16) -> io::Result<()> {
    set_int(socket, libc::SOL_UDP, libc::UDP_SEGMENT, size.into())
}

/// Sets the upper-layer protocol of a connected TCP socket (TCP_ULP).
///
/// # Errors
/// ENOENT if the kernel has no protocol of this name, EOPNOTSUPP if user space may not set it.
pub fn set_upper_layer(socket: impl AsFd, name: &str) -> io::Result<()> {
    set(socket, libc::SOL_TCP, libc::TCP_ULP, name.as_bytes())
}

/// Makes the kernel encrypt (TLS 1.3) bytes sent over a TCP socket with the protocol "tls". The
/// keys are constants, which [`decrypt`] uses as well.
///
/// # Errors
/// ENOENT if the kernel does not have the cipher, AES-128-GCM.
pub fn encrypt(socket: impl AsFd) -> io::Result<()> {
    set_keys(socket, TLS_TX)
}

/// Makes the kernel decrypt bytes received over a TCP socket with the protocol "tls", which the
/// other end sent after [`encrypt`].
///
/// # Errors
/// As there.
pub fn decrypt(socket: impl AsFd) -> io::Result<()> {
    set_keys(socket, TLS_RX)
}

/// A packet socket (packet(7)) on an interface. Each frame that is sent or received has a `struct
/// virtio_net_hdr` of 10 bytes in front of it.
///
/// # Errors
/// EPERM without CAP_NET_RAW; ENODEV without such an interface.
pub fn packet_socket(interface: &InterfaceName) -> io::Result<OwnedFd> {
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: the call touches no memory.
    let socket = unsafe { libc::socket(libc::AF_PACKET, kind, protocol.into()) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above made it, and nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    set_int(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
    // SAFETY: the structure consists of integers, for which all zeroes is a value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol;
    address.sll_ifindex = interface.index()?;
    let (at, len) = (std::ptr::from_ref(&address), size_of_val(&address));
    // SAFETY: the kernel reads `len` bytes, the length of the structure.
    check(unsafe { libc::bind(socket.as_raw_fd(), at.cast(), len as libc::socklen_t) })?;
    Ok(socket)
}

/// Makes two interfaces that are joined (veth), in the namespace of the calling thread (`ip link add`), without
/// starting a process.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN; EEXIST; EOPNOTSUPP if the kernel has no veth.
pub fn add_veth_pair(ends: [&InterfaceName; 2], mtu: u32, queues: u32) -> io::Result<()> {
    const NEW_LINK: u16 = 16;
    /// REQUEST, ACK, EXCL and CREATE.
    const CREATE: u16 = 1 | 4 | 0x200 | 0x400;
    const IFNAME: u16 = 3;
    const MTU: u16 = 4;
    const LINKINFO: u16 = 18;
    const NUM_TX_QUEUES: u16 = 31;
    const NUM_RX_QUEUES: u16 = 32;
    const INFO_KIND: u16 = 1;
    const INFO_DATA: u16 = 2;
    const VETH_INFO_PEER: u16 = 1;
    // `struct ifinfomsg`, then the attributes of an end.
    let end = |name: &InterfaceName| {
        let queues = queues.to_ne_bytes();
        [
            vec![0; 16],
            attribute(IFNAME, format!("{name}\0").as_bytes()),
            attribute(MTU, &mtu.to_ne_bytes()),
            attribute(NUM_TX_QUEUES, &queues),
            attribute(NUM_RX_QUEUES, &queues),
        ]
        .concat()
    };
    let [first, second] = ends;
    let data = attribute(INFO_DATA, &attribute(VETH_INFO_PEER, &end(second)));
    let info = [attribute(INFO_KIND, b"veth"), data].concat();
    change_link(
        NEW_LINK,
        CREATE,
        &[end(first), attribute(LINKINFO, &info)].concat(),
    )
}

/// Removes an interface from the namespace of the calling thread (`ip link del`).
///
/// # Errors
/// EPERM without CAP_NET_ADMIN; ENODEV without such an interface.
pub fn remove_interface(interface: &InterfaceName) -> io::Result<()> {
    const DELETE_LINK: u16 = 17;
    const REQUEST_AND_ACKNOWLEDGE: u16 = 1 | 4;
    // `struct ifinfomsg`, with the index of the interface.
    let mut link = [0; 16];
    link[4..8].copy_from_slice(&interface.index()?.to_ne_bytes());
    change_link(DELETE_LINK, REQUEST_AND_ACKNOWLEDGE, &link)
}

fn set_keys(socket: impl AsFd, direction: libc::c_int) -> io::Result<()> {
    // `struct tls12_crypto_info_aes_gcm_128`: the version (1.3) and the cipher as u16, then 8 bytes
    // of the IV, 16 of the key, 4 of the salt, and 8 of the first record's number.
    let mut keys = [0; 40];
    keys[..2].copy_from_slice(&0x0304_u16.to_ne_bytes());
    keys[2..4].copy_from_slice(&51_u16.to_ne_bytes());
    keys[4..12].fill(1);
    keys[12..28].fill(2);
    keys[28..32].fill(3);
    set(socket, SOL_TLS, direction, &keys)
}
