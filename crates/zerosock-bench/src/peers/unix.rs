//! A Unix stream socket with the largest buffer allowed without privileges. Both sides sleep.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::net::sockopt::set_socket_send_buffer_size;

use crate::peers::bytes::Bytes;
use crate::worker;
use crate::worker::order::Order;
use crate::worker::touch::Fault;

/// The kernel silently limits it to /proc/sys/net/core/wmem_max. The default buffer holds about 300
/// small writes; a larger one makes the two sides wait for each other less.
const SEND_BUFFER: usize = 4 << 20;

/// Variant of an order: keep the default buffer, as the sockets behind a device have it.
pub(crate) const USUAL: &str = "usual-buffer";

/// Connects the two sides.
pub(crate) fn join(order: &Order) -> Result<Bytes<UnixStream, UnixStream>, Fault> {
    let stream = if order.job.is_open() {
        let path = Path::new(&order.place).join("socket");
        let listener = UnixListener::bind(&path).map_err(|error| format!("bind: {error}"))?;
        worker::announce_open(&path.to_string_lossy())?;
        let accepted = listener.accept();
        accepted.map_err(|error| format!("accept: {error}"))?.0
    } else {
        UnixStream::connect(order.destination()?).map_err(|error| format!("connect: {error}"))?
    };
    if order.how.as_deref() != Some(USUAL) {
        set_socket_send_buffer_size(&stream, SEND_BUFFER).map_err(|error| error.to_string())?;
    }
    let input = stream.try_clone().map_err(|error| error.to_string())?;
    Ok(Bytes::new(input, stream, order.size))
}
