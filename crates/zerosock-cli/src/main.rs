//! The `zerosock` command.
fn main() {}
