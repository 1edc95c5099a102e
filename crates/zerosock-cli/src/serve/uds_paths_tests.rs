//! Unit tests of `uds_paths`.

use super::*;

fn of(values: &[&str]) -> Result<UdsPaths, UdsPathError> {
    let values = values.iter().map(|value| UdsPath::parse(value.as_ref()));
    UdsPaths::of(values.collect::<Result<Vec<_>, _>>()?)
}

#[test]
fn a_value_with_a_port_is_the_socket_of_that_port() {
    let paths = of(&["/run/3.vsock", "1234=/run/agent.sock", "0x16=/run/ssh=1"]).unwrap();
    assert_eq!(paths.base, Some("/run/3.vsock".into()));
    let ports: Vec<_> = paths.ports.into_iter().collect();
    let wanted = [(22, "/run/ssh=1"), (1234, "/run/agent.sock")];
    assert_eq!(
        ports,
        wanted.map(|(port, path)| (Port::new(port), path.into()))
    );
    for base in ["./1=a", "a=b", "=a", "3a=b", "0xd/e=f", "/run/1=2"] {
        assert_eq!(of(&[base]).unwrap(), UdsPaths::from(base));
    }
}

#[test]
fn a_mistyped_port_is_not_a_path() {
    for port in ["4294967295", "70000000000", "010", "0x1ffffffff", "any"] {
        let said = of(&[&format!("{port}=/a")]);
        assert_eq!(said, Err(UdsPathError::Port(port.into())));
    }
}

#[test]
fn the_path_of_a_port_is_utf8() {
    let path = OsStr::from_bytes(b"1=/a\xff");
    let said = UdsPath::parse(path).unwrap_err();
    assert!(matches!(said, UdsPathError::NotUtf8(_)), "{said}");
    let base = OsStr::from_bytes(b"/a\xff");
    assert!(matches!(UdsPath::parse(base), Ok(UdsPath::Base(path)) if path == base));
}

#[test]
fn a_path_and_a_port_are_given_once() {
    assert_eq!(of(&["/a", "/b"]), Err(UdsPathError::Twice("uds-path")));
    let port = Port::new(7);
    assert_eq!(of(&["7=/a", "7=/a"]), Err(UdsPathError::PortTwice(port)));
}

#[test]
fn the_file_has_a_path_or_a_list() {
    let one: UdsPaths = serde_yaml_ng::from_str("/run/3.vsock").unwrap();
    assert_eq!(one, UdsPaths::from("/run/3.vsock"));
    for none in ["", "null", "~"] {
        let paths: UdsPaths = serde_yaml_ng::from_str(none).unwrap();
        assert_eq!(paths, UdsPaths::default(), "{none:?}");
        let vm: super::super::vm::RawVm =
            serde_yaml_ng::from_str(&format!("socket: /a\nuds_path: {none}\n")).unwrap();
        assert_eq!(vm.uds_path, UdsPaths::default(), "{none:?}");
    }
    let list: UdsPaths = serde_yaml_ng::from_str("[/run/3.vsock, 1234=/run/agent.sock]").unwrap();
    assert_eq!(list, of(&["/run/3.vsock", "1234=/run/agent.sock"]).unwrap());
    let error = serde_yaml_ng::from_str::<UdsPaths>("[1=/a, 1=/b]").unwrap_err();
    assert!(
        error.to_string().contains("port 1 has two paths"),
        "{error}"
    );
}
