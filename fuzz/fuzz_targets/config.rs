//! The file of `serve --config`: an error or valid settings, the same at every reading, without a panic.
#![no_main]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

static FILE: LazyLock<File> = LazyLock::new(|| {
    zerosock_sys::memfd::create("config", 0, false)
        .unwrap()
        .into()
});

fuzz_target!(|text: &str| {
    FILE.set_len(0).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&*FILE, text.as_bytes(), 0).unwrap();
    zerosock_cli::fuzz::config(&format!("/proc/self/fd/{}", FILE.as_raw_fd()));
});
