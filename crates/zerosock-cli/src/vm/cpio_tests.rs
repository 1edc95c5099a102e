//! Unit tests of `cpio`.

use super::*;
use std::io::Write;
use std::process::{Command, Stdio};

#[test]
fn header_is_newc() {
    let mut archive = Archive::default();
    archive.program("init", b"abcde");
    let bytes = archive.finish();
    assert_eq!(&bytes[..6], b"070701");
    assert_eq!(&bytes[110..115], b"init\0");
    // 110 + 5 = 115, padded to 116.
    assert_eq!(&bytes[116..121], b"abcde");
    assert_eq!(&bytes[124..130], b"070701");
    assert_eq!(bytes.len() % 4, 0);
}

/// busybox's cpio reads back what was written (skipped by name where there is none).
#[test]
fn a_second_decoder_reads_the_same_values() {
    let mut archive = Archive::default();
    archive.program("a/b/tool", b"data");
    archive.symlink("a/link", "b/tool");
    let bytes = archive.finish();
    let child = Command::new("cpio")
        .args(["-t", "--quiet"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        println!("SKIPPED a_second_decoder_reads_the_same_values: no cpio on this machine");
        return;
    };
    child.stdin.take().unwrap().write_all(&bytes).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "a\na/b\na/b/tool\na/link\n"
    );
}
