//! The memory of a map: whole pages, aligned, with the headers at the beginning.
//!
//! ```text
//! struct virtio_vsock_usr_hdr_pref { u32 poll_value; u32 hdr_num; };   at byte 0
//! struct virtio_vsock_usr_hdr      { u32 length;     u32 flags;   };   from byte 8 on
//! ```
//!
//! Numbers are in the machine's byte order, as the kernel's are. A native header is longer by a
//! u64. The header behind the last has a length of 0.

use super::PAGE;

/// Bytes of the prefix in front of the headers.
pub(super) const PREFIX: usize = 8;

/// Zeroed, page-aligned pages.
pub(super) struct Pages {
    /// One page more than used, for alignment. Never reallocated: the address stays.
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    pub(super) fn new(pages: usize) -> Pages {
        let bytes = vec![0; (pages + 1) * PAGE];
        let start = bytes.as_ptr().addr().next_multiple_of(PAGE) - bytes.as_ptr().addr();
        let len = pages * PAGE;
        Pages { bytes, start, len }
    }

    pub(super) fn addr(&self) -> usize {
        self.bytes.as_ptr().addr() + self.start
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    fn word(&self, at: usize) -> u32 {
        self.array(at).map_or(0, u32::from_ne_bytes)
    }

    fn array<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.as_slice().get(at..at + N)?.try_into().ok()
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.as_mut_slice().get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    pub(super) fn poll_value(&self) -> u32 {
        self.word(0)
    }

    pub(super) fn hdr_num(&self) -> u32 {
        self.word(4)
    }

    pub(super) fn set_poll_value(&mut self, value: u32) {
        if self.poll_value() != value {
            self.put(0, &value.to_ne_bytes());
        }
    }

    pub(super) fn set_hdr_num(&mut self, number: u32) {
        self.put(4, &number.to_ne_bytes());
    }

    /// Header `index`, of `N` bytes; `None` beyond the pages.
    pub(super) fn header<const N: usize>(&self, index: usize) -> Option<[u8; N]> {
        self.array(PREFIX + index * N)
    }

    pub(super) fn set_header<const N: usize>(&mut self, index: usize, header: [u8; N]) {
        self.put(PREFIX + index * N, &header);
    }
}

/// Headers of `size` bytes that `pages` pages hold, with the one of length 0 behind them.
pub(super) fn capacity(pages: usize, size: usize) -> usize {
    ((pages * PAGE - PREFIX) / size).saturating_sub(1)
}

/// Pages for `headers` headers of `size` bytes and the one of length 0 behind them.
pub(super) fn pages_for(headers: usize, size: usize) -> usize {
    (PREFIX + (headers + 1) * size).div_ceil(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned_and_headers_have_the_offsets_of_the_document() {
        let mut pages = Pages::new(2);
        assert!(pages.addr().is_multiple_of(PAGE));
        assert_eq!(pages.as_slice().len(), 2 * PAGE);
        assert_eq!(pages.as_slice().as_ptr().addr(), pages.addr());
        pages.set_poll_value(!0);
        pages.set_hdr_num(5);
        pages.set_header(0, 0x0807_0605_0403_0201_u64.to_le_bytes());
        assert_eq!(pages.as_slice()[..4], [0xff; 4]);
        assert_eq!(pages.as_slice()[4..8], 5_u32.to_ne_bytes());
        assert_eq!(pages.as_slice()[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn one_page_has_510_headers_and_the_end_marker() {
        // 8 + 510 * 8 + 8 = 4096.
        assert_eq!(capacity(1, 8), 510);
        assert_eq!(pages_for(510, 8), 1);
        assert_eq!(pages_for(511, 8), 2);
        assert_eq!(capacity(2, 8), 1022);
        let mut pages = Pages::new(1);
        pages.set_header(510, [9; 8]);
        assert_eq!(pages.header(510), Some([9; 8]));
        assert_eq!(pages.header::<8>(511), None);
        pages.set_header(511, [9; 8]);
        assert_eq!(pages.as_slice()[PAGE - 8..], [9; 8]);
    }
}
