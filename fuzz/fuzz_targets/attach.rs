//! Messages of the attach protocol, as they are and with a valid header. What is accepted is encoded such that the same
//! is decoded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zerosock::fuzz::attach;

fuzz_target!(|bytes: &[u8]| {
    attach(bytes);
    // The magic number and the version.
    attach(&[&b"zsat\x01\0\x02\0"[..], bytes].concat());
});
