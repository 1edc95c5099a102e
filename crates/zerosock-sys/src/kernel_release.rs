//! The release of the running kernel.

use std::sync::LazyLock;

static RELEASE: LazyLock<(u32, u32)> = LazyLock::new(|| {
    let name = rustix::system::uname();
    let text = name.release().to_string_lossy();
    let mut numbers = text.split(['.', '-']).map(str::parse);
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or(0);
    (next(), next())
});

/// Its major and minor number; zeroes if it does not tell. Read once.
pub(crate) fn release() -> (u32, u32) {
    *RELEASE
}
