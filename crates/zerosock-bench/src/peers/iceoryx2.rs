//! iceoryx2: publish-subscribe over shared memory, as a program of its own.
//!
//! A separate crate (`bench/iceoryx2` in the checkout) carries out the same orders, so that
//! `zerosock-bench` does not compile its many dependencies; `--install-peers` builds it.

use std::path::PathBuf;

use super::install;

/// The program.
pub(crate) const PROGRAM: &str = "zerosock-peer-iceoryx2";
/// The variable that names it.
pub(crate) const VARIABLE: &str = "ZEROSOCK_PEER_ICEORYX2";

/// Path of the program, or why there is none.
pub(crate) fn find() -> Result<PathBuf, String> {
    install::find(VARIABLE, PROGRAM)
}

/// Builds it from the checkout around the current directory.
pub(crate) fn install() -> Result<(), String> {
    if find().is_ok() {
        return Ok(());
    }
    let here = std::env::current_dir().map_err(|error| format!("current directory: {error}"))?;
    let source = here
        .ancestors()
        .map(|dir| dir.join("bench/iceoryx2"))
        .find(|dir| dir.join("Cargo.toml").is_file())
        .ok_or("its source is bench/iceoryx2: run this inside a checkout of zerosock")?;
    install::cargo_install(PROGRAM, &["--path".as_ref(), source.as_os_str()])
}
