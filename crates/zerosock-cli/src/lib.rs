//! What the `zerosock` command and its VM tests share: guests booted for one run.
//!
//! Not an interface for others; the library is the crate `zerosock`.

pub mod vm;
