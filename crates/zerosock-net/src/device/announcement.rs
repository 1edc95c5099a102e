//! The broadcast that tells a network where a guest is now.

use zerosock_proto::wire::net::Mac;

/// Bytes of the shortest Ethernet frame, without its checksum.
const LEN: usize = 60;
/// The Ethernet type of RARP (RFC 903).
const ETHER_TYPE: [u8; 2] = [0x80, 0x35];
/// Ethernet and IPv4, addresses of 6 and 4 bytes, "request reverse".
const REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 3];

/// A RARP request of `mac` for its own protocol address, as a broadcast. Switches learn from it where
/// the address is; hosts do not answer.
pub(super) fn rarp(mac: Mac) -> [u8; LEN] {
    let mut frame = [0; LEN];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac.0);
    frame[12..14].copy_from_slice(&ETHER_TYPE);
    frame[14..22].copy_from_slice(&REQUEST);
    // Sender and target are the same; their protocol addresses stay 0.
    frame[22..28].copy_from_slice(&mac.0);
    frame[32..38].copy_from_slice(&mac.0);
    frame
}
