//! Unit tests of `sandbox`.

use super::*;

#[test]
fn a_placeholder_ends_the_directory_of_a_path() {
    assert_eq!(
        directory_of(Path::new("/run/z/3.vsock")),
        Path::new("/run/z")
    );
    assert_eq!(
        directory_of(Path::new("/run/z/{cid}/s")),
        Path::new("/run/z")
    );
    assert_eq!(directory_of(Path::new("/run/p{cid}")), Path::new("/run"));
    let here = std::env::current_dir().unwrap();
    assert_eq!(directory_of(Path::new("vm.sock")), here);
}

#[test]
fn a_configuration_that_needs_more_is_refused_by_name() {
    let mut start = Needs::new(None);
    start.socket(Path::new("/run/z/3.vsock"));
    start.reads(Path::new("/etc/z/vms.yaml"));
    let mut same = start.clone();
    same.socket(Path::new("/run/z/more/4.vsock"));
    same.reads(Path::new("/etc/z/key"));
    assert_eq!(start.lacks(&same), None);
    let mut other = start.clone();
    other.socket(Path::new("/run/other/4.vsock"));
    assert_eq!(start.lacks(&other).unwrap(), "the directory /run/other");
    // Where sockets are made, files may be read, and not the other way round.
    let mut other = start.clone();
    other.socket(Path::new("/etc/z/sock"));
    assert_eq!(start.lacks(&other).unwrap(), "the directory /etc/z");
    let mut other = start.clone();
    other.network_target();
    assert!(start.lacks(&other).unwrap().contains("family"));
    let mut listens = start.clone();
    listens.network_listener();
    assert!(listens.lacks(&other).unwrap().contains("TCP"));
}
