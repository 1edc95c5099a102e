//! TCP over the loopback interface, without Nagle's delay. Both sides sleep.

use std::net::{Ipv4Addr, TcpListener, TcpStream};

use crate::peers::bytes::Bytes;
use crate::worker;
use crate::worker::order::Order;
use crate::worker::touch::Fault;

/// Connects the two sides at a port that the kernel chooses.
pub(crate) fn join(order: &Order) -> Result<Bytes<TcpStream, TcpStream>, Fault> {
    let stream = if order.job.is_open() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listener = listener.map_err(|error| format!("bind: {error}"))?;
        let address = listener.local_addr().map_err(|error| error.to_string())?;
        worker::announce_open(&address.to_string())?;
        let accepted = listener.accept();
        accepted.map_err(|error| format!("accept: {error}"))?.0
    } else {
        TcpStream::connect(order.destination()?).map_err(|error| format!("connect: {error}"))?
    };
    stream
        .set_nodelay(true)
        .map_err(|error| error.to_string())?;
    let input = stream.try_clone().map_err(|error| error.to_string())?;
    Ok(Bytes::new(input, stream, order.size))
}
