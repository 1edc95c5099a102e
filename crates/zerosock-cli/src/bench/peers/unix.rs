//! A Unix stream socket with the kernel's own buffer sizes. Both sides sleep.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use crate::bench::peers::bytes::Bytes;
use crate::bench::peers::destination;
use crate::bench::worker;
use crate::bench::worker::order::Order;
use crate::bench::worker::touch::Fault;

/// Makes the connection.
pub(crate) fn join(order: &Order) -> Result<Bytes<UnixStream, UnixStream>, Fault> {
    let stream = if order.job.is_open() {
        let path = Path::new(&order.place).join("socket");
        let listener = UnixListener::bind(&path).map_err(|error| format!("bind: {error}"))?;
        worker::say_open(&path.to_string_lossy())?;
        let accepted = listener.accept();
        accepted.map_err(|error| format!("accept: {error}"))?.0
    } else {
        UnixStream::connect(destination(order)?).map_err(|error| format!("connect: {error}"))?
    };
    let input = stream.try_clone().map_err(|error| error.to_string())?;
    Ok(Bytes::new(input, stream, order.size))
}
