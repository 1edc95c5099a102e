//! Unit tests of `network`.

use super::*;

fn network(text: &str) -> Result<Network, String> {
    let network: Network = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
    network.check(str::to_owned)?;
    Ok(network)
}

#[test]
fn a_guest_has_a_path_and_perhaps_an_address() {
    let guest: Guest = "/run/a,mac=52:54:00:00:00:01,mac-filter".parse().unwrap();
    let from_file = "{socket: /run/a, mac: '52:54:00:00:00:01', mac_filter: true}";
    assert_eq!(serde_yaml_ng::from_str::<Guest>(from_file).unwrap(), guest);
    for text in ["/run/a,mac=5", "/run/a,x", "/run/a,mac"] {
        assert!(text.parse::<Guest>().is_err(), "{text}");
    }
}

#[test]
fn the_fault_of_a_bridge_names_it() {
    let bridge = "nobr".parse().unwrap();
    let fault = |error: Errno| bridge_fault(&bridge, &error.into());
    assert_eq!(
        fault(Errno::NODEV),
        "there is no bridge nobr: make it with `ip link add nobr type bridge`"
    );
    assert_eq!(fault(Errno::OPNOTSUPP), "nobr is no bridge");
    assert_eq!(fault(Errno::BUSY), "it is a port of another bridge");
    assert!(fault(Errno::PERM).starts_with("Operation not permitted"));
}

#[test]
fn what_does_not_go_together_is_refused_by_name() {
    assert!(network("{tap: t0, bridge: b, guests: [{socket: a}]}").is_ok());
    assert!(network("{guests: [{socket: a}, {socket: b}]}").is_ok());
    let xdp = network("{xdp: 'e0:3', xdp_drop_long: true, mtu: 1510, guests: [{socket: a}]}");
    assert_eq!(xdp.unwrap().xdp.unwrap().to_string(), "e0:3");
    for (text, wanted) in [
        ("{guests: [{socket: a}]}", "tap: name the interface"),
        ("{tap: t0, guests: []}", "guests: none"),
        (
            "{tap: t0, mtu: 67, guests: [{socket: a}]}",
            "mtu: 68 to 65521, not 67",
        ),
        (
            "{tap: t0, mtu: 65522, guests: [{socket: a}]}",
            "mtu: 68 to 65521, not 65522",
        ),
        (
            "{tap: t0, queues: 17, guests: [{socket: a}]}",
            "queues: 1 to 16",
        ),
        (
            "{queues: 2, guests: [{socket: a}, {socket: b}]}",
            "queues: a switch",
        ),
        (
            "{bridge: b, guests: [{socket: a}, {socket: b}]}",
            "bridge: needs tap",
        ),
        (
            "{guests: [{socket: a}, {socket: a}]}",
            "a: used by two guests",
        ),
        (
            "{tap: t0, guests: [{socket: a, mac_filter: true}]}",
            "mac-filter: needs mac",
        ),
        ("{xdp: 'e0:256', guests: [{socket: a}]}", "IFACE[:QUEUE]"),
        (
            "{xdp: e0, tap: t0, guests: [{socket: a}]}",
            "xdp: not together",
        ),
        (
            "{xdp: 'e0:255', queues: 2, guests: [{socket: a}]}",
            "queues: beyond queue 255",
        ),
        (
            "{xdp: e0, mtu: 1511, guests: [{socket: a}]}",
            "mtu: at most 1510",
        ),
        (
            "{xdp: e0, share_tap: true, guests: [{socket: a}]}",
            "share-tap: needs tap",
        ),
        (
            "{tap: t0, xdp_copy: true, guests: [{socket: a}]}",
            "xdp-copy: needs xdp",
        ),
        (
            "{tap: 'a b', guests: [{socket: a}]}",
            "name has 1 to 15 bytes",
        ),
        (
            "{tap: t0, tap_fd: [3], guests: [{socket: a}]}",
            "unknown field `tap_fd`",
        ),
    ] {
        let said = network(text).unwrap_err();
        assert!(said.contains(wanted), "{text}: {said}");
    }
}
