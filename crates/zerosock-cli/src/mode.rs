//! Permissions of sockets, in octal.

use rustix::fs::Mode;

/// Parses `0660`, `660` or `0o660`: at most 0777.
pub(crate) fn parse_mode(text: &str) -> Option<Mode> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|digit| (b'0'..=b'7').contains(&digit)) {
        return None;
    }
    u32::from_str_radix(digits, 8)
        .ok()
        .filter(|&bits| bits <= 0o777)
        .map(Mode::from_raw_mode)
}
