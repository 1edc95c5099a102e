//! Two named pipes, one in each direction, of the largest size allowed without privileges. Both
//! sides sleep.

use std::fs::File;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::peers::bytes::Bytes;
use crate::worker;
use crate::worker::order::Order;
use crate::worker::touch::Fault;

/// Linux's default of /proc/sys/fs/pipe-max-size, the limit for users without privileges.
const PIPE_BYTES: usize = 1 << 20;

/// Makes the pipes. Opening one waits for its other end, so both sides open them in the same order.
pub(crate) fn join(order: &Order) -> Result<Bytes<File, File>, Fault> {
    if order.job.is_open() {
        let place = Path::new(&order.place);
        for name in [THERE, BACK] {
            let mode = Mode::RUSR | Mode::WUSR;
            mknodat(CWD, place.join(name), FileType::Fifo, mode, 0)
                .map_err(|error| format!("mkfifo: {error}"))?;
        }
        worker::announce_open(&order.place)?;
        let input = File::open(place.join(THERE)).map_err(open)?;
        let output = write_end(&place.join(BACK))?;
        Ok(Bytes::new(input, output, order.size))
    } else {
        let place = Path::new(order.destination()?);
        let output = write_end(&place.join(THERE))?;
        let input = File::open(place.join(BACK)).map_err(open)?;
        Ok(Bytes::new(input, output, order.size))
    }
}

const THERE: &str = "there";
const BACK: &str = "back";

fn write_end(path: &Path) -> Result<File, Fault> {
    let file = File::options().write(true).open(path).map_err(open)?;
    // Where the system allows less, keep the default size.
    let _ = rustix::pipe::fcntl_setpipe_size(&file, PIPE_BYTES);
    Ok(file)
}

fn open(error: std::io::Error) -> Fault {
    format!("open pipe: {error}")
}
