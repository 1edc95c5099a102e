//! What the agent writes into each page before it names them, and what the daemon reads there before it writes.
//!
//! The value depends on the nonce of the stream and on the place of the page in the list. So pages show it only if the
//! agent could write them after the nonce was known, if their addresses were translated correctly, and if the daemon
//! sees the memory of the guest in clear.

use core::ops::Range;

use sha2::{Digest, Sha256};
use zerosock_ring::{Extent, Memory, Piece};

use super::key::Nonce;

/// Bytes of a page with a value of its own.
pub const PAGE: u64 = 4096;
/// Bytes of a value.
pub const VALUE_LEN: usize = 16;
/// Where the value lies in its page: in the last bytes. A driver leaves the last cache line of each huge page free
/// ([`Plan::of_huge_pages`](zerosock_vhost_user::frontend::Plan::of_huge_pages)), so no ring and no buffer has the place
/// of the last value in a huge page. There the daemon can find out, after the VM was stopped, whether it still is the
/// same page.
pub const VALUE_AT: u64 = PAGE - VALUE_LEN as u64;
/// Pages of a huge page.
const PAGES_OF_HUGE: u64 = Extent::HUGE_PAGE / PAGE;
/// With nonce and number it fits one block of the hash.
const LABEL: &[u8] = b"zerosock page\0";

/// The value of page `number` of the list, counted from 0 through all extents: the first bytes of the SHA-256 of label,
/// nonce and number.
pub fn page_value(nonce: &Nonce, number: u64) -> [u8; VALUE_LEN] {
    let hash = Sha256::new().chain_update(LABEL).chain_update(nonce.0);
    let hash: [u8; 32] = hash.chain_update(number.to_le_bytes()).finalize().into();
    let mut value = [0; VALUE_LEN];
    for (to, from) in value.iter_mut().zip(hash) {
        *to = from;
    }
    value
}

/// Writes the values into these pages of a memory that has the order of the list and begins at 0. Returns the first page
/// that does not lie in it.
pub fn write_values(memory: &Memory, nonce: &Nonce, pages: Range<u64>) -> Option<u64> {
    find_page(memory, pages, |piece, number| {
        memory.write(piece, 0, &page_value(nonce, number)) == VALUE_LEN
    })
}

/// Clears the values of these pages when the daemon has checked them, except for the last one of each huge page, which it
/// reads again after the VM was stopped. For a memory that has the order of the list and begins at 0.
pub fn clear_values(memory: &Memory, pages: Range<u64>) {
    find_page(memory, pages, |piece, number| {
        let is_kept = number % PAGES_OF_HUGE == PAGES_OF_HUGE - 1;
        is_kept || memory.write(piece, 0, &[0; VALUE_LEN]) == VALUE_LEN
    });
}

/// The first of these pages of a memory that has another value than it should have, or does not lie in it. For a memory
/// that has the order of the list and begins at 0.
pub fn find_wrong_page(
    memory: &Memory,
    nonce: &Nonce,
    pages: impl Iterator<Item = u64>,
) -> Option<u64> {
    find_page(memory, pages, |piece, number| {
        memory.read_array(piece, 0) == Some(page_value(nonce, number))
    })
}

/// The first page whose value does not lie in the memory, or for which `is_right` is false.
fn find_page(
    memory: &Memory,
    pages: impl Iterator<Item = u64>,
    is_right: impl Fn(&[Piece], u64) -> bool,
) -> Option<u64> {
    let mut pieces = Vec::new();
    for number in pages {
        pieces.clear();
        // Instead of wrapping it becomes the last address, where no value fits.
        let addr = number.saturating_mul(PAGE).saturating_add(VALUE_AT);
        let translated = memory.translate(addr, VALUE_LEN as u32, &mut pieces);
        if translated.is_err() || !is_right(&pieces, number) {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
#[path = "page_value_tests.rs"]
mod tests;
