//! What the processes of these tests have in common: paths, times, and orders to clients.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

pub(super) const SOCKET: &str = "/run/zerosock/attach.sock";
pub(super) const PAGES: &str = "/run/zerosock/pages";
/// Longer than each step takes on a busy machine.
pub(super) const LIMIT: Duration = Duration::from_secs(60);
pub(super) const POLL: Duration = Duration::from_millis(1);

/// Waits until `what_is_left` has nothing to tell.
pub(super) fn wait_until(
    mut what_is_left: impl FnMut() -> io::Result<Option<String>>,
) -> io::Result<()> {
    let deadline = Instant::now() + LIMIT;
    while let Some(left) = what_is_left()? {
        if Instant::now() > deadline {
            return Err(io::Error::other(left));
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// How a client frees the pages of its file.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum How {
    Truncate,
    Punch,
    Remove,
}

pub(super) const HOW: [(How, &str); 3] = [
    (How::Truncate, "truncate"),
    (How::Punch, "punch"),
    (How::Remove, "remove"),
];

/// What a client is to do before it is killed.
#[derive(Copy, Clone, Debug)]
pub(super) struct Order {
    pub(super) how: How,
    /// It uses its memory until it is killed. Else it only waits.
    pub(super) goes_on: bool,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = HOW.iter().find(|it| it.0 == self.how).map(|it| it.1);
        write!(f, "{} {}", name.unwrap_or_default(), self.goes_on)
    }
}

impl FromStr for Order {
    type Err = ();

    fn from_str(text: &str) -> Result<Order, ()> {
        let (name, goes_on) = text.split_once(' ').ok_or(())?;
        let how = HOW.iter().find(|it| it.1 == name).ok_or(())?.0;
        let goes_on = goes_on.parse().map_err(drop)?;
        Ok(Order { how, goes_on })
    }
}
