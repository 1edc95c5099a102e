//! What both forms of maps do alike: polling, and the frame of a fill.

use super::RxMapError;
use super::errors::of_nothing;
use super::pages::Pages;
use super::rx_poll;
use crate::table::backend::Backend;
use crate::table::transfers::RecvFault;
use crate::vsock::stream::Stream;

/// What a fill has put into the map.
pub(super) struct Filled {
    /// Headers.
    pub(super) headers: usize,
    /// The value of `hdr_num`.
    pub(super) number: usize,
    /// Why it ended, if not for want of room or packets.
    pub(super) fault: Option<RecvFault>,
}

/// Fills a map by `put`, and returns its `hdr_num`.
pub(super) fn fill(
    stream: &Stream,
    pages: &mut Pages,
    put: impl FnOnce(&mut dyn Backend, &mut Pages) -> Filled,
) -> Result<usize, RxMapError> {
    let mut locked = stream.conn.core.lock();
    if locked.backend().pending() {
        locked.drive()?;
    }
    let backend = locked.backend();
    let Filled {
        headers,
        number,
        mut fault,
    } = put(backend, pages);
    if headers == 0 && fault.is_none() {
        // Without unread bytes a peek returns the state of the connection.
        fault = backend.read(stream.conn.id, &mut [0], true).err();
    }
    let value = rx_poll::value(backend, stream);
    backend.flush_after_read();
    drop(locked);
    pages.set_hdr_num(number as u32);
    pages.set_poll_value(value);
    match fault {
        Some(fault) if headers == 0 => of_nothing(fault).map(|()| 0),
        _ => Ok(number),
    }
}

/// Makes the calls of a map with the fields `stream`, `pages` and `rx_poll`.
macro_rules! map_calls {
    ($map:ident) => {
        impl<S: Borrow<Stream>> $map<S> {
            /// The stream.
            pub fn stream(&self) -> &Stream {
                self.stream.borrow()
            }

            /// The poll value: [`EMPTY`](super::EMPTY), [`DATA`](super::DATA) or
            /// [`CLOSED`](super::CLOSED). For polling in a loop: makes no system call while no packet
            /// arrives.
            ///
            /// # Errors
            /// When the endpoint is over.
            pub fn poll_value(&mut self) -> Result<u32, RxMapError> {
                let value = self.rx_poll.poll(self.stream.borrow())?;
                self.pages.set_poll_value(value);
                Ok(value)
            }

            /// Waits as the stream does ([`Stream::set_wait`], [`Stream::set_nonblocking`],
            /// [`Stream::set_read_timeout`]) until the poll value is not [`EMPTY`](super::EMPTY); returns
            /// it. For programs that would use `poll(2)`.
            ///
            /// # Errors
            /// `WouldBlock`, `TimedOut`, or when the endpoint has failed.
            pub fn wait(&mut self) -> Result<u32, RxMapError> {
                self.stream.borrow().wait_readable()?;
                self.poll_value()
            }

            /// The `poll_value` stored in the map by the last call.
            pub fn last_poll_value(&self) -> u32 {
                self.pages.poll_value()
            }

            /// The `hdr_num` stored in the map: headers, or pages of data in a paged map, of the last fill.
            pub fn hdr_num(&self) -> u32 {
                self.pages.hdr_num()
            }
        }
    };
}
pub(super) use map_calls;
