//! Unit tests of `rtnetlink`.

use super::*;

fn message(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut message = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend([0; 10]);
    message.extend(body);
    message
}

#[test]
fn attributes_are_found_up_to_a_malformed_one() {
    let bytes = [
        attribute(3, b"a"),
        attribute(0x8004, b"bc"),
        attribute(5, &[]),
    ]
    .concat();
    let all: Vec<_> = Attributes(&bytes).collect();
    assert_eq!(all, [(3, &b"a"[..]), (4, b"bc"), (5, b"")]);
    assert_eq!(Attributes::find(&bytes, 4), Some(&b"bc"[..]));
    assert_eq!(Attributes::find(&bytes, 6), None);
    // The padding of the last one may be missing.
    assert_eq!(Attributes::find(&bytes[..5], 3), Some(&b"a"[..]));
    // A length below that of the head, and one beyond the end.
    for len in [0_u16, 3, 6] {
        let mut bytes = bytes.clone();
        bytes.truncate(9);
        bytes[..2].copy_from_slice(&len.to_ne_bytes());
        let found = Attributes(&bytes).next();
        assert_eq!(found, (len == 6).then_some((3, &b"a\0"[..])), "{len}");
        bytes[..2].copy_from_slice(&10_u16.to_ne_bytes());
        assert_eq!(Attributes(&bytes).next(), None);
    }
}

#[test]
fn every_prefix_of_an_answer_is_an_answer_or_an_error() {
    let body = [vec![0; LINK], attribute(3, b"tap\0"), attribute(4, &[1; 4])].concat();
    let whole = message(NEW_LINK, &body);
    for len in 0..whole.len() {
        assert!(link_attributes(&whole[..len]).is_err(), "{len}");
    }
    assert_eq!(link_attributes(&whole).unwrap(), body[LINK..]);
    // Lengths that lie.
    for len in [0, 15, 31, whole.len() as u32 + 1, u32::MAX] {
        let mut lying = whole.clone();
        lying[..4].copy_from_slice(&len.to_ne_bytes());
        assert!(link_attributes(&lying).is_err(), "{len}");
    }
    let error = link_attributes(&message(ERROR, &(-libc::ENODEV).to_ne_bytes()));
    assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::ENODEV));
    assert!(link_attributes(&message(ERROR, &[1])).is_err());
}
