//! Unit tests of `activation`.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;

use super::*;

#[test]
fn a_path_goes_before_a_name_and_leftovers_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let passed = |name: &str, socket: OwnedFd| Listener {
        name: name.to_string(),
        on: address_of(&socket).unwrap(),
        socket,
        is_made: false,
    };
    let bound = |path| OwnedFd::from(UnixListener::bind(at(path)).unwrap());
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp_on = ListenAddress::Tcp(tcp.local_addr().unwrap());
    let sockets = vec![
        passed("socket-3", tcp.into()),
        passed("socket-3", bound("a")),
        passed("socket-3", bound("b")),
        passed("stray", bound("c")),
    ];
    let mut inherited = Inherited { sockets };
    let unix = |path| ListenAddress::Unix(at(path));
    let names = ["socket-3".to_string()];
    let mut claim = |on: &ListenAddress, names: &[String]| {
        let claimed = inherited.claim(on, names, true);
        claimed.map(|listener| address_of(&listener.socket).unwrap())
    };
    assert_eq!(claim(&unix("b"), &names), Some(unix("b")));
    assert_eq!(claim(&unix("elsewhere"), &names), Some(unix("a")));
    assert_eq!(claim(&unix("elsewhere"), &names), None);
    assert_eq!(claim(&"tcp:127.0.0.1:1".parse().unwrap(), &[]), None);
    assert_eq!(claim(&tcp_on, &[]), Some(tcp_on.clone()));
    let said = inherited.finish().unwrap_err().to_string();
    assert!(said.contains("`stray`"), "{said}");
}

#[test]
fn paths_are_compared_by_their_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let replaced = dir.path().join("a\u{fffd}");
    let longest = "n".repeat(107 - dir.path().as_os_str().len() - 1);
    for name in [OsStr::from_bytes(b"a\xff"), OsStr::new(&longest)] {
        let path = dir.path().join(name);
        let socket = OwnedFd::from(UnixListener::bind(&path).unwrap());
        let passed = Listener {
            name: String::new(),
            on: address_of(&socket).unwrap(),
            socket,
            is_made: false,
        };
        let mut inherited = Inherited {
            sockets: vec![passed],
        };
        assert!(
            inherited
                .claim(&ListenAddress::Unix(replaced.clone()), &[], true)
                .is_none()
        );
        assert!(
            inherited
                .claim(&ListenAddress::Unix(path), &[], true)
                .is_some()
        );
    }
}

#[test]
fn an_abstract_socket_is_named_and_belongs_to_no_rule() {
    let name = format!("zerosock-{}-\u{e9}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let socket = OwnedFd::from(UnixListener::bind_addr(&address).unwrap());
    let passed = Listener {
        name: "web".to_string(),
        on: address_of(&socket).unwrap(),
        socket,
        is_made: false,
    };
    let mut inherited = Inherited {
        sockets: vec![passed],
    };
    let like_it = ListenAddress::Unix(format!("@{name}").into());
    assert!(inherited.claim(&like_it, &[], true).is_none());
    let said = inherited.finish().unwrap_err().to_string();
    let shown = format!("bound to @zerosock-{}-\\xc3\\xa9:", std::process::id());
    assert!(said.contains(&shown), "{said}");
}
