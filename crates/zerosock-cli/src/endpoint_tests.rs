//! Unit tests of `endpoint`.

use super::*;

fn attached(role: AttachRole, path: &str, to: Option<CidOrName>, port: u32) -> EndpointArg {
    let (path, port) = (path.into(), Port::new(port));
    EndpointArg::Attached(Attached {
        role,
        path,
        to,
        port,
    })
}

fn name(name: &str) -> Option<CidOrName> {
    Some(CidOrName::Name(name.parse().unwrap()))
}

#[test]
fn every_form_is_parsed_and_displayed_unchanged() {
    let cid = Some(CidOrName::Cid(Cid::new(3)));
    for (text, wanted) in [
        (
            "attach:/run/a:3:7",
            attached(AttachRole::Process, "/run/a", cid, 7),
        ),
        (
            "attach-listen:/run/a:7",
            attached(AttachRole::Process, "/run/a", None, 7),
        ),
        (
            "service:/run/a:b:db-1:7",
            attached(AttachRole::Service, "/run/a:b", name("db-1"), 7),
        ),
        (
            "service-listen:/run/a:7",
            attached(AttachRole::Service, "/run/a", None, 7),
        ),
    ] {
        assert_eq!(text.parse(), Ok(wanted.clone()));
        assert_eq!(wanted.to_string(), text);
    }
    for text in [
        "tcp-listen:127.0.0.1:80",
        "unix:/a",
        "hybrid:/a:7",
        "vsock:2:1",
    ] {
        let end: EndpointArg = text.parse().unwrap();
        assert!(matches!(end, EndpointArg::Kernel(_)), "{text}");
        assert_eq!(end.to_string(), text);
    }
}

#[test]
fn cids_and_ports_have_other_forms() {
    let cid = |cid| Some(CidOrName::Cid(Cid::new(cid)));
    for (text, to) in [
        ("attach:/a:0x3:22", cid(3)),
        ("attach:/a:host:22", cid(2)),
        ("attach:/a:2:0x16", cid(2)),
        // Processes with these names.
        ("attach:/a:local:22", name("local")),
        ("attach:/a:hypervisor:22", name("hypervisor")),
        ("attach:/a:any:22", name("any")),
    ] {
        let wanted = attached(AttachRole::Process, "/a", to, 22);
        assert_eq!(text.parse(), Ok(wanted), "{text}");
    }
    // Reserved CIDs have names; a process may be named "local".
    for (text, shown) in [
        ("vsock:host:0x16", "vsock:2:22"),
        ("service:/a:0x3:7", "service:/a:3:7"),
        ("attach:/a:host:7", "attach:/a:2:7"),
        ("attach:/a:local:7", "attach:/a:local:7"),
    ] {
        assert_eq!(text.parse::<EndpointArg>().unwrap().to_string(), shown);
    }
}

#[test]
fn an_unknown_kind_is_answered_with_all_forms() {
    let said = "nonsense".parse::<EndpointArg>().unwrap_err();
    for form in FORMS.split(", ").chain(ATTACHED_FORMS.split(", ")) {
        assert!(said.contains(form), "{form}: {said}");
        assert_eq!(said.matches(form).count(), 1, "{form}: {said}");
    }
}
