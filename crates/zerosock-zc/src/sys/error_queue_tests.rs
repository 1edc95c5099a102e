//! Unit tests of `error_queue`.

use super::*;

fn message(level: i32, kind: i32, data: &[u8]) -> Vec<u8> {
    let mut bytes = (mem::size_of::<usize>() + 8 + data.len())
        .to_ne_bytes()
        .to_vec();
    bytes.extend(level.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(mem::size_of::<usize>()), 0);
    bytes
}

fn notification(origin: u8, lo: u32, hi: u32) -> Vec<u8> {
    let mut bytes = vec![0, 0, 0, 0, origin, 0, COPIED, 0];
    bytes.extend(lo.to_ne_bytes());
    bytes.extend(hi.to_ne_bytes());
    bytes
}

#[test]
fn a_notification_is_found_behind_other_messages() {
    let found = Some((3, 9, true));
    for (level, kind) in [(libc::SOL_IP, 11), (libc::SOL_IPV6, 25), VSOCK] {
        let wanted = message(level, kind, &notification(ORIGIN, 3, 9));
        let odd = message(libc::SOL_SOCKET, libc::SCM_TIMESTAMP, &[1; 13]);
        assert_eq!(reported_range(&wanted), found);
        assert_eq!(reported_range(&[odd, wanted].concat()), found);
    }
}

#[test]
fn a_message_that_is_no_notification_reports_no_range() {
    let like_one = notification(ORIGIN, 3, 9);
    assert_eq!(
        reported_range(&message(libc::SOL_SOCKET, 11, &like_one)),
        None
    );
    let other = notification(2, 3, 9);
    assert_eq!(reported_range(&message(libc::SOL_IP, 11, &other)), None);
    let whole = message(libc::SOL_IP, 11, &like_one);
    for len in 0..whole.len() {
        assert_eq!(reported_range(&whole[..len]), None, "{len}");
    }
    for len in [0, 1, 15, usize::MAX, usize::MAX - 7] {
        let mut bytes = message(libc::SOL_SOCKET, 1, &[0; 64]);
        bytes[..8].copy_from_slice(&len.to_ne_bytes());
        assert_eq!(reported_range(&bytes), None, "{len}");
    }
}
