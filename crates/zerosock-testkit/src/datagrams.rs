//! Whether a stream consists of datagrams that were sent.

use std::collections::HashMap;

/// Bytes of `received` that are no whole datagram of `sent`, which was sent in datagrams of `size` bytes.
/// Datagrams may be missing and in another order; none may come twice.
pub fn foreign_bytes(sent: &[u8], received: &[u8], size: usize) -> usize {
    let size = size.max(1);
    let mut left: HashMap<&[u8], usize> = HashMap::new();
    for datagram in sent.chunks(size) {
        *left.entry(datagram).or_default() += 1;
    }
    let mut foreign = 0;
    for datagram in received.chunks(size) {
        match left.get_mut(datagram) {
            Some(count @ 1..) => *count -= 1,
            _ => foreign += datagram.len(),
        }
    }
    foreign
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_and_reordered_datagrams_are_no_foreign_bytes() {
        let sent = b"aabbcc";
        for (received, foreign) in [
            (&b""[..], 0),
            (b"ccaa", 0),
            (b"aaaa", 2),
            (b"aabb", 0),
            (b"abbc", 4),
            (b"aab", 1),
        ] {
            assert_eq!(foreign_bytes(sent, received, 2), foreign, "{received:?}");
        }
    }
}
