//! Unit tests of `paged`.

use super::super::{EOM, EOR};
use super::*;

fn lay(layout: &mut Layout, packets: &[(usize, u32)]) -> Vec<(usize, u32, u32)> {
    let mut laid = Vec::new();
    for &(len, flags) in packets {
        let Some(placed) = layout.place(len, flags) else {
            break;
        };
        laid.push((placed.page, placed.header.length, placed.header.flags));
        layout.take(placed);
    }
    laid
}

#[test]
fn example_of_the_document_has_three_headers_and_five_pages() {
    let mut layout = Layout::new(5, 510);
    let laid = lay(&mut layout, &[(56, 0), (4096, 0), (8200, EOM), (1, 0)]);
    assert_eq!(laid, [(0, 56, 0), (1, 4096, 0), (2, 8200, EOM)]);
    assert_eq!((layout.headers, layout.pages), (3, 5));
}

#[test]
fn only_the_last_part_of_a_packet_has_its_flags() {
    let both = EOM | EOR;
    let mut layout = Layout::new(2, 510);
    assert_eq!(lay(&mut layout, &[(10_000, both)]), [(0, 8192, 0)]);
    let mut layout = Layout::new(2, 510);
    assert_eq!(
        lay(&mut layout, &[(1808, both), (9, EOM)]),
        [(0, 1808, both), (1, 9, EOM)]
    );
}

#[test]
fn packet_that_does_not_fit_is_left_for_the_next_fill() {
    let mut layout = Layout::new(3, 510);
    assert_eq!(lay(&mut layout, &[(1, EOM), (8193, EOM)]), [(0, 1, EOM)]);
    let mut layout = Layout::new(1000, 2);
    assert_eq!(lay(&mut layout, &[(1, 0); 3]).len(), 2, "headers end too");
}
