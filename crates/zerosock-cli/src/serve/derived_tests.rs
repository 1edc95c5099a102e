//! Unit tests of `derived`.

use std::os::unix::fs::symlink;

use super::*;

fn base(path: impl Into<PathBuf>, is_template: bool) -> PortBase {
    PortBase {
        option: String::new(),
        path: path.into(),
        is_template,
    }
}

#[test]
fn a_derived_name_is_the_path_an_underscore_and_a_port() {
    let plain = base("/d/s3.vsock", false);
    for (name, port) in [
        ("/d/s3.vsock_77", Some(77)),
        ("/d//./s3.vsock_0", Some(0)),
        ("/d/s3.vsock_4294967295", Some(u32::MAX)),
        ("/d/s3.vsock_4294967296", None),
        ("/d/s3.vsock_077", None),
        ("/d/s3.vsock_+7", None),
        ("/d/s3.vsock_", None),
        ("/d/s3.vsock_7x", None),
        ("/d/s3.vsock", None),
        ("/d/s4.vsock_77", None),
        ("/other/s3.vsock_77", None),
    ] {
        assert_eq!(plain.port_of(Path::new(name)), port, "{name}");
    }
    let each = base("/d/p{cid}0.vsock", true);
    for (name, port) in [
        ("/d/p50.vsock_7", Some(7)),
        ("/d/p3000.vsock_7", Some(7)),
        ("/d/p0.vsock_7", None),
        ("/d/p5.vsock_7", None),
        ("/d/p{cid}0.vsock_7", None),
    ] {
        assert_eq!(each.port_of(Path::new(name)), port, "{name}");
    }
    let literal = base("/d/p{cid}", false);
    assert_eq!(literal.port_of(Path::new("/d/p{cid}_7")), Some(7));
}

#[test]
fn directories_are_compared_as_files() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("a")).unwrap();
    symlink("a", dir.path().join("link")).unwrap();
    let at = |name: &str| dir.path().join(name);
    let base = base(at("a/s"), false);
    for name in ["a/s_7", "link/s_7", "a/../a/s_7", "link/../a//s_7"] {
        assert_eq!(base.port_of(&at(name)), Some(7), "{name}");
    }
    assert_eq!(base.port_of(&at("s_7")), None);
}
