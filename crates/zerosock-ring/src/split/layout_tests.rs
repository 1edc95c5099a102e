//! Unit tests of `layout`.

use super::*;

#[test]
fn descriptors_have_the_specified_layout() {
    let descriptor = Descriptor {
        addr: 0x0102_0304_0506_0708,
        len: 0x1112_1314,
        flags: 0x2122,
        next: 0x3132,
    };
    let bytes = [
        8, 7, 6, 5, 4, 3, 2, 1, 0x14, 0x13, 0x12, 0x11, 0x22, 0x21, 0x32, 0x31,
    ];
    assert_eq!(descriptor.to_bytes(), bytes);
    assert_eq!(Descriptor::from_bytes(bytes), descriptor);
    assert_eq!(Descriptor::from_words(descriptor.to_words()), descriptor);
}

#[test]
fn parts_follow_each_other_without_overlap() {
    // virtio 1.2, 2.7: 16 * size, 6 + 2 * size, 6 + 8 * size; aligned to 16, 2, 4.
    let layout = DriverLayout::at(0x1000, 256);
    assert_eq!(
        layout,
        DriverLayout {
            size: 256,
            desc: 0x1000,
            avail: 0x2000,
            used: 0x2208
        }
    );
    assert_eq!(DriverLayout::bytes_needed(256), 0x1208 + 6 + 2048);
    for size in (0..16).map(|bit| 1u16 << bit) {
        let layout = DriverLayout::at(0, size);
        assert!(layout.avail >= desc_len(size) && layout.avail.is_multiple_of(2));
        assert!(layout.used >= layout.avail + avail_len(size) && layout.used.is_multiple_of(4));
        assert!(DriverLayout::bytes_needed(size) >= layout.used + used_len(size));
    }
}

#[test]
fn queues_overlap_if_any_two_of_their_parts_do() {
    let config = |desc, avail, used| QueueConfig {
        size: 8,
        desc,
        avail,
        used,
        base: 0,
        event_idx: true,
        indirect: true,
    };
    let one = config(0x1000, 0x2000, 0x3000);
    assert!(one.overlaps(&one));
    // The parts are 128, 22 and 70 bytes long.
    for (other, expected) in [
        (config(0x1080, 0x2016, 0x3048), false),
        (config(0x0f80, 0x1fea, 0x2fb8), false),
        (config(0x1070, 0x5000, 0x6000), true),
        (config(0x5000, 0x2014, 0x6000), true),
        (config(0x5000, 0x6000, 0x3044), true),
        (config(0x5000, 0x6000, 0x1ffc), true),
        (config(0x5000, 0x107e, 0x6000), true),
        (config(0x5000, 0x1080, 0x6000), false),
        (config(u64::MAX - 15, u64::MAX - 1, u64::MAX - 3), false),
    ] {
        assert_eq!(one.overlaps(&other), expected, "{other:x?}");
        assert_eq!(other.overlaps(&one), expected, "{other:x?}");
    }
}

#[test]
fn queue_sizes_must_be_powers_of_two() {
    for size in [0u16, 3, 5, 6, 257, 32767, 32769, 65535] {
        assert_eq!(check_size(size), Err(QueueError::Size(size)));
    }
    for bit in 0..16 {
        assert_eq!(check_size(1 << bit), Ok(()));
    }
}
