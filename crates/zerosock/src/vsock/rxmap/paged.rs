//! The paged receive map: the document's own layout, filled by copying.
//!
//! ```text
//!             Page 0        Page 1      Page N
//!     [ pref hdr0 .. hdrN ][ data ] .. [ data ]
//! ```
//!
//! "[hdr_num] shows number of mapped pages with data which starts from second page"; "single
//! header could represent array of pages (when packet's buffer is bigger than one page)"; the
//! header behind the last has 0 in its length field.

use std::borrow::Borrow;
use std::fmt;
use std::ops::{BitOr, Range};

use super::pages::{Pages, capacity};
use super::rx_poll::RxPoll;
use super::shared::{Filled, fill, map_calls};
use super::{EMPTY, PAGE, RxMapError, STREAM_FLAGS};
use crate::vsock::stream::Stream;

/// Bytes of a header.
const HEADER: usize = 8;

/// What may be done with a mapping, as for `mmap(2)`.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use zerosock::vsock::rxmap::{PAGE, PagedRxMap, Protection, RxMapError};
///
/// let both = Protection::READ | Protection::WRITE;
/// let error = PagedRxMap::new(&process, 2 * PAGE, both).unwrap_err();
/// assert!(matches!(error, RxMapError::Protection));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Protection(u32);

impl Protection {
    /// PROT_NONE.
    pub const NONE: Protection = Protection(0);
    /// PROT_READ: the only one that a receive map has.
    pub const READ: Protection = Protection(1);
    /// PROT_WRITE.
    pub const WRITE: Protection = Protection(2);
    /// PROT_EXEC.
    pub const EXEC: Protection = Protection(4);
}

impl BitOr for Protection {
    type Output = Protection;

    fn bitor(self, other: Protection) -> Protection {
        Protection(self.0 | other.0)
    }
}

/// `struct virtio_vsock_usr_hdr`.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use std::io::Write;
/// use zerosock::vsock::rxmap::{PAGE, PagedHeader, PagedRxMap, Protection};
///
/// let mut map = PagedRxMap::new(&process, 5 * PAGE, Protection::READ)?;
/// (&host).write_all(b"hello")?;
/// map.wait()?;
/// map.fill()?;
/// let header = PagedHeader { length: 5, flags: 0 };
/// assert_eq!(map.header(0), Some(header));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct PagedHeader {
    /// Bytes of payload, from the beginning of a page on. 0: the end of the headers.
    pub length: u32,
    /// [`EOM`](super::EOM), [`EOR`](super::EOR).
    pub flags: u32,
}

/// A receive map in the document's layout, into which packets are copied: for programs that need
/// consecutive whole pages, or that were written for that interface. [`RxMap`](super::RxMap) does
/// not copy.
///
/// `S` is the stream or a reference to it: `&Stream`, `Arc<Stream>`. A stream can have any number
/// of maps; each fill takes the next packets.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use std::io::Write;
/// use zerosock::vsock::rxmap::{PAGE, PagedRxMap, Protection};
///
/// // A page of headers, and four of data.
/// let mut map = PagedRxMap::new(&process, 5 * PAGE, Protection::READ)?;
/// (&host).write_all(b"hello")?;
/// map.wait()?;
/// map.fill()?;
/// assert_eq!(map.page(1).expect("data")[..5], *b"hello");
/// map.release(1..2)?;
/// assert!(map.page(1).is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A page cannot outlive a release or the next fill:
///
/// ```compile_fail,E0502
/// # use zerosock::vsock::rxmap::PagedRxMap;
/// # use zerosock::vsock::Stream;
/// fn page_outlives_release(map: &mut PagedRxMap<&Stream>) {
///     let page = map.page(1).unwrap();
///     map.release(1..2).unwrap();
///     assert_eq!(page[0], b'h');
/// }
/// ```
///
/// ```compile_fail,E0502
/// # use zerosock::vsock::rxmap::PagedRxMap;
/// # use zerosock::vsock::Stream;
/// fn page_outlives_fill(map: &mut PagedRxMap<&Stream>) {
///     let page = map.page(1).unwrap();
///     map.fill().unwrap();
///     assert_eq!(page[0], b'h');
/// }
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct PagedRxMap<S: Borrow<Stream>> {
    stream: S,
    pages: Pages,
    header_pages: usize,
    /// The data pages that the last fill used; true for those that are not released.
    mapped: Vec<bool>,
    unreleased: usize,
    rx_poll: RxPoll,
}

map_calls!(PagedRxMap);

impl<S: Borrow<Stream>> PagedRxMap<S> {
    /// Maps `length` bytes: a page of headers and pages of data. As
    /// `mmap(NULL, length, protection, MAP_SHARED, socket, 0)` does.
    ///
    /// # Errors
    /// [`RxMapError::NotEnabled`], [`RxMapError::Protection`], [`RxMapError::Length`].
    pub fn new(
        stream: S,
        length: usize,
        protection: Protection,
    ) -> Result<PagedRxMap<S>, RxMapError> {
        PagedRxMap::with_header_pages(stream, length, protection, 1)
    }

    /// As [`new`](Self::new), with more than one page of headers: a page has 510. Data begins
    /// behind them.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_header_pages(
        stream: S,
        length: usize,
        protection: Protection,
        header_pages: usize,
    ) -> Result<PagedRxMap<S>, RxMapError> {
        if !stream.borrow().rx_map() {
            return Err(RxMapError::NotEnabled);
        }
        if protection != Protection::READ {
            return Err(RxMapError::Protection);
        }
        let pages = length / PAGE;
        if !length.is_multiple_of(PAGE)
            || header_pages == 0
            || pages <= header_pages
            || u32::try_from(length).is_err()
        {
            return Err(RxMapError::Length(length));
        }
        Ok(PagedRxMap {
            stream,
            pages: Pages::new(pages),
            header_pages,
            mapped: Vec::new(),
            unreleased: 0,
            rx_poll: RxPoll::default(),
        })
    }

    /// Where the map begins.
    pub fn addr(&self) -> usize {
        self.pages.addr()
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a map has at least two pages")]
    pub fn len(&self) -> usize {
        self.pages.as_slice().len()
    }

    /// Copies received packets into the map, without blocking; returns the number of data pages
    /// (`hdr_num`). 0: no packets; with a poll value of [`CLOSED`](super::CLOSED) none will arrive.
    ///
    /// A packet that does not fit behind the others is left for the next fill. Only a packet longer
    /// than all data pages together is split.
    ///
    /// # Errors
    /// [`RxMapError::NotReleased`] while pages of the last fill are not released. A reset of the
    /// connection, after all packets received before it.
    pub fn fill(&mut self) -> Result<usize, RxMapError> {
        if self.unreleased > 0 {
            return Err(RxMapError::NotReleased);
        }
        let stream = self.stream.borrow();
        let first_data = self.header_pages * PAGE;
        let data_pages = self.pages.as_slice().len() / PAGE - self.header_pages;
        let mut layout = Layout::new(data_pages, capacity(self.header_pages, HEADER));
        let filled = fill(stream, &mut self.pages, |backend, pages| {
            let mut fault = None;
            while let Some(next) = backend.ahead(stream.conn.id).and_then(|ahead| ahead.next) {
                let Some(place) = layout.place(next.len, STREAM_FLAGS) else {
                    break;
                };
                let start = first_data + place.page * PAGE;
                let out = pages.as_mut_slice();
                let out = out
                    .get_mut(start..start + place.header.length as usize)
                    .unwrap_or(&mut []);
                // Reads exactly `out.len()` bytes: they were there, and this thread holds the lock.
                if let Err(error) = backend.read(stream.conn.id, out, false) {
                    fault = Some(error);
                    break;
                }
                stream
                    .conn
                    .counts
                    .add_read_copied(place.header.length as usize);
                let bytes = [place.header.length, place.header.flags];
                pages.set_header(place.index, encode(bytes));
                layout.take(place);
            }
            let (headers, number) = (layout.headers, layout.pages);
            pages.set_header(headers, encode([0, 0]));
            Filled {
                headers,
                number,
                fault,
            }
        });
        self.mapped.clear();
        self.mapped.resize(layout.pages, true);
        self.unreleased = layout.pages;
        filled
    }

    /// As [`fill`](Self::fill), of the map at `addr`, as `getsockopt(SO_VM_SOCKETS_MAP_RX)` has
    /// it.
    ///
    /// # Errors
    /// [`RxMapError::Address`] if that is not where this map begins.
    pub fn fill_at(&mut self, addr: usize) -> Result<usize, RxMapError> {
        if addr != self.addr() {
            return Err(RxMapError::Address(addr));
        }
        self.fill()
    }

    /// Header `index`; `None` beyond the header pages. The first of length 0 is the end.
    pub fn header(&self, index: usize) -> Option<PagedHeader> {
        if index > capacity(self.header_pages, HEADER) {
            return None;
        }
        let bytes: [u8; HEADER] = self.pages.header(index)?;
        let [a, b, c, d, e, f, g, h] = bytes;
        Some(PagedHeader {
            length: u32::from_ne_bytes([a, b, c, d]),
            flags: u32::from_ne_bytes([e, f, g, h]),
        })
    }

    /// The headers of the last fill, without the end, and the payload of each, as long as none of
    /// its pages is released.
    pub fn packets(&self) -> impl Iterator<Item = (PagedHeader, Option<&[u8]>)> + '_ {
        let mut page = self.header_pages;
        (0..).map_while(move |index| {
            let header = self.header(index).filter(|header| header.length > 0)?;
            let len = header.length as usize;
            let pages = page..page + len.div_ceil(PAGE);
            page = pages.end;
            let whole = pages.clone().all(|page| self.is_mapped(page));
            let start = pages.start * PAGE;
            let data = self.pages.as_slice().get(start..start + len);
            Some((header, data.filter(|_| whole)))
        })
    }

    /// Page `index` of the map; `None` for a page of data that the last fill did not use or that is
    /// released. The document's map has nothing there either.
    pub fn page(&self, index: usize) -> Option<&[u8]> {
        if index >= self.header_pages && !self.is_mapped(index) {
            return None;
        }
        self.pages.as_slice().get(index * PAGE..(index + 1) * PAGE)
    }

    fn is_mapped(&self, page: usize) -> bool {
        page.checked_sub(self.header_pages)
            .and_then(|page| self.mapped.get(page))
            .is_some_and(|mapped| *mapped)
    }

    /// Releases pages, by their numbers in the map; skips pages without data, such as header pages.
    ///
    /// # Errors
    /// [`RxMapError::Range`] for pages behind the end of the map.
    pub fn release(&mut self, pages: Range<usize>) -> Result<(), RxMapError> {
        if pages.start > pages.end || pages.end > self.len() / PAGE {
            return Err(RxMapError::Range);
        }
        let from = pages.start.saturating_sub(self.header_pages);
        let to = pages.end.saturating_sub(self.header_pages);
        let to = to.min(self.mapped.len());
        for mapped in self.mapped.get_mut(from..to).unwrap_or(&mut []) {
            self.unreleased -= usize::from(std::mem::take(mapped));
        }
        Ok(())
    }

    /// As [`release`](Self::release), as `madvise(addr, length, MADV_DONTNEED)` has it: the
    /// address is a page's, the length is rounded up to pages.
    ///
    /// # Errors
    /// [`RxMapError::Range`].
    pub fn release_at(&mut self, addr: usize, length: usize) -> Result<(), RxMapError> {
        let from = addr.checked_sub(self.addr()).ok_or(RxMapError::Range)?;
        if !from.is_multiple_of(PAGE) {
            return Err(RxMapError::Range);
        }
        let to = from.checked_add(length).ok_or(RxMapError::Range)?;
        self.release(from / PAGE..to.div_ceil(PAGE))
    }
}

fn encode([length, flags]: [u32; 2]) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..4].copy_from_slice(&length.to_ne_bytes());
    bytes[4..].copy_from_slice(&flags.to_ne_bytes());
    bytes
}

/// Where packets go in the map. Separate from the connection, so that tests can use flags that
/// streams do not have.
#[derive(Debug)]
struct Layout {
    data_pages: usize,
    most_headers: usize,
    pages: usize,
    headers: usize,
}

/// The position of a packet in the map.
#[derive(Debug, Eq, PartialEq)]
struct Placed {
    index: usize,
    /// The index of its first data page.
    page: usize,
    header: PagedHeader,
}

impl Layout {
    fn new(data_pages: usize, most_headers: usize) -> Layout {
        Layout {
            data_pages,
            most_headers,
            pages: 0,
            headers: 0,
        }
    }

    /// The position of a packet of `len` bytes, or of its first part; `None`: in the next fill.
    fn place(&self, len: usize, flags: u32) -> Option<Placed> {
        let room = (self.data_pages - self.pages) * PAGE;
        if self.headers == self.most_headers || room == 0 || len == 0 {
            return None;
        }
        if len > room && self.pages > 0 {
            return None;
        }
        let taken = len.min(room);
        Some(Placed {
            index: self.headers,
            page: self.pages,
            header: PagedHeader {
                length: taken as u32,
                // Only the last part carries the flags.
                flags: if taken == len { flags } else { 0 },
            },
        })
    }

    fn take(&mut self, placed: Placed) {
        self.pages += (placed.header.length as usize).div_ceil(PAGE);
        self.headers += 1;
    }
}

impl<S: Borrow<Stream>> fmt::Debug for PagedRxMap<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagedRxMap")
            .field("len", &self.len())
            .field("hdr_num", &self.hdr_num())
            .field("has_data", &(self.last_poll_value() != EMPTY))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "paged_tests.rs"]
mod tests;
