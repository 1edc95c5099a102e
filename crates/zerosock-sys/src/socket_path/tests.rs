use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use super::*;

/// A user that is neither root nor ours.
const OTHER: u32 = 65534;

struct Directory(tempfile::TempDir);

impl Directory {
    /// With a socket `real/s`.
    fn new() -> (Directory, UnixListener) {
        let directory = Directory(tempfile::tempdir().unwrap());
        fs::create_dir(directory.at("real")).unwrap();
        let listener = UnixListener::bind(directory.at("real/s")).unwrap();
        (directory, listener)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn refusal(&self, name: &str) -> String {
        let error = find(&self.at(name)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        error.to_string()
    }
}

fn connects(found: &FoundSocket) {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    );
    connect_to(socket.unwrap(), found.address()).unwrap();
}

#[test]
fn links_of_our_own_are_followed_anywhere_in_the_path() {
    let (directory, _listener) = Directory::new();
    symlink("real", directory.at("relative")).unwrap();
    symlink(directory.at("real"), directory.at("absolute")).unwrap();
    symlink("../relative/s", directory.at("real/last")).unwrap();
    symlink("loop", directory.at("loop")).unwrap();
    for name in [
        "real/s",
        "relative/s",
        "absolute/s",
        "real/last",
        "real/../real//./s",
    ] {
        connects(&find(&directory.at(name)).unwrap());
    }
    let error = find(&directory.at("loop/s")).unwrap_err().to_string();
    assert!(error.contains("/loop: "), "{error}");
    assert!(find_cached(&directory.at("relative/s")).unwrap().is_none());
}

#[test]
fn a_link_of_another_user_is_refused_and_named_wherever_it_is() {
    let (directory, _listener) = Directory::new();
    symlink("real", directory.at("link")).unwrap();
    symlink("s", directory.at("real/last")).unwrap();
    for link in ["link", "real/last"] {
        if let Err(error) = lchown(directory.at(link), Some(OTHER), None) {
            return println!("SKIPPED: cannot give a link away: {error}");
        }
    }
    for (name, link) in [("link/s", "link"), ("real/last", "real/last")] {
        let text = directory.refusal(name);
        let wanted = format!(
            "{}: a symbolic link of user {OTHER} is not followed",
            directory.at(link).display()
        );
        assert_eq!(text, wanted);
        assert!(find_cached(&directory.at(name)).unwrap().is_none());
    }
}

#[test]
fn a_link_in_a_directory_that_others_can_write_to_is_refused() {
    let (directory, _listener) = Directory::new();
    symlink("real", directory.at("link")).unwrap();
    for mode in [0o1777, 0o770] {
        fs::set_permissions(directory.0.path(), Permissions::from_mode(mode)).unwrap();
        let text = directory.refusal("link/s");
        assert!(text.contains("other users can write to"), "{text}");
        // Without a link, the directory may be of any kind.
        connects(&find(&directory.at("real/s")).unwrap());
    }
}

#[test]
fn what_is_missing_or_no_socket_is_named() {
    let (directory, _listener) = Directory::new();
    fs::write(directory.at("file"), "").unwrap();
    for (name, part, kind) in [
        ("none/s", "none", io::ErrorKind::NotFound),
        ("file/s", "file", io::ErrorKind::NotADirectory),
    ] {
        let error = find(&directory.at(name)).unwrap_err();
        assert_eq!(error.kind(), kind);
        let wanted = format!("{}: ", directory.at(part).display());
        assert!(error.to_string().starts_with(&wanted), "{error}");
    }
    let error = find(&directory.at("file")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}

/// The links of procfs lead to objects: their text is no path.
#[test]
fn a_descriptor_in_proc_is_followed() {
    let (directory, _listener) = Directory::new();
    let file = fs::File::open(directory.at("real")).unwrap();
    let path = format!("/proc/self/fd/{}/s", file.as_raw_fd());
    connects(&find(Path::new(&path)).unwrap());
}

#[test]
fn a_trace_names_the_links_and_ends_before_one_of_another_user() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir_all(at("real/inner")).unwrap();
    fs::create_dir(at("shared")).unwrap();
    symlink("real", at("link")).unwrap();
    symlink(at("real"), at("shared/foreign")).unwrap();
    fs::set_permissions(at("shared"), Permissions::from_mode(0o777)).unwrap();
    let traced = walk::trace(&at("link/../link/inner")).unwrap();
    assert_eq!(traced.path, at("real/inner"));
    let link = (at("link"), PathBuf::from("real"));
    assert_eq!(traced.links, [link.clone(), link]);
    let traced = walk::trace(&at("shared/foreign/inner")).unwrap();
    assert_eq!((traced.path, traced.links), (at("shared"), Vec::new()));
    assert!(walk::trace(&at("missing/inner")).is_err());
}
