//! Unit tests of `addr`.

use super::*;

#[test]
fn reserved_cids_are_refused_for_guests() {
    for cid in [0, 1, 2, 0xffff_ffff] {
        assert_eq!(Cid::new(cid).for_guest(), Err(AddressError::Reserved(cid)));
    }
    for cid in [0x1_0000_0000, 0x1_0000_0003, u64::MAX] {
        assert_eq!(Cid::try_from(cid), Err(AddressError::TooWide(cid)));
    }
    assert_eq!(Cid::try_from(3_u64), Ok(Cid::new(3)));
    for cid in [3, 0xffff_fffe] {
        assert_eq!(Cid::new(cid).for_guest(), Ok(Cid::new(cid)));
    }
}

#[test]
fn displayed_addresses_parse() {
    let address = Address::new(Cid::new(3), Port::new(1024));
    assert_eq!(address.to_string(), "3:1024");
    assert_eq!("3:1024".parse(), Ok(address));
    assert_eq!("4294967295".parse(), Ok(Port::ANY));
    for cid in [0, 1, 2, 3, u32::MAX] {
        for port in [0, 22, u32::MAX] {
            let address = Address::from((Cid::from(cid), Port::from(port)));
            assert_eq!(address.to_string().parse(), Ok(address));
            assert_eq!(format!("{address:#}").parse(), Ok(address));
        }
    }
}

#[test]
fn the_forms_of_socat_and_systemd_parse() {
    let cids = [
        (
            Cid::HYPERVISOR,
            ["0", "hypervisor", "VMADDR_CID_HYPERVISOR", "0x0"],
        ),
        (Cid::LOCAL, ["1", "local", "VMADDR_CID_LOCAL", "0x1"]),
        (Cid::HOST, ["2", "host", "VMADDR_CID_HOST", "0x2"]),
        (Cid::ANY, ["4294967295", "any", "VMADDR_CID_ANY", "-1"]),
    ];
    for (cid, texts) in cids {
        for text in texts {
            assert_eq!(text.parse(), Ok(cid), "{text}");
            let address = Address::new(cid, Port::new(22));
            assert_eq!(format!("{text}:22").parse(), Ok(address), "{text}");
            assert_eq!(format!("vsock:{text}:0x16").parse(), Ok(address), "{text}");
        }
    }
    for text in ["4294967295", "any", "-1", "VMADDR_PORT_ANY", "0xffffffff"] {
        assert_eq!(text.parse(), Ok(Port::ANY), "{text}");
    }
    // systemd.socket(5): ListenStream=vsock:CID:PORT, with an empty CID for any.
    let any = Address::new(Cid::ANY, Port::new(1234));
    assert_eq!("vsock::1234".parse(), Ok(any));
    assert_eq!(format!("{any:#}"), "vsock::1234");
}

#[test]
fn invalid_addresses_have_distinct_errors() {
    let parse = |s: &str| s.parse::<Address>();
    assert_eq!(parse("3"), Err(AddressError::NoColon));
    assert_eq!(parse("vsock:3"), Err(AddressError::NoColon));
    assert_eq!(parse(":3"), Err(AddressError::Cid));
    assert_eq!(parse("3:"), Err(AddressError::Port));
    assert_eq!(parse("vsock:3:"), Err(AddressError::Port));
    assert_eq!(parse("+3:1"), Err(AddressError::Cid));
    for cid in [
        "-2",
        "0x",
        "0x1ffffffff",
        "0x+1",
        "010",
        "guest",
        "Host",
        " 3",
    ] {
        assert_eq!(parse(&format!("{cid}:1")), Err(AddressError::Cid), "{cid}");
    }
    assert_eq!(parse("3:4294967296"), Err(AddressError::Port));
    assert_eq!(parse("3:1:2"), Err(AddressError::Port));
    assert_eq!(parse("3:host"), Err(AddressError::Port));
}
