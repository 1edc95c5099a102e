//! Unit tests of `settings`.

use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    args: PerfArgs,
}

fn settings(line: &str) -> Result<Settings, String> {
    let words = std::iter::once("perf").chain(line.split_whitespace());
    let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
    Settings::new(line.args).map_err(|failure| failure.to_string())
}

#[test]
fn the_originals_defaults() {
    let server = settings("-s").unwrap();
    assert_eq!(server.buffer, 16 << 20);
    let Role::Server(Server { port, bytes }) = server.role else {
        panic!("{server:?}");
    };
    assert_eq!((port, bytes), (Port::new(1234), 2 << 30));
    let client = settings("-c host").unwrap();
    assert_eq!(client.buffer, 128 << 10);
    let Role::Client(client) = client.role else {
        panic!("{client:?}");
    };
    assert_eq!(client.peer, Address::new(Cid::HOST, Port::new(1234)));
    assert_eq!(
        (client.mode, client.check_mode),
        (Mode::Copy, CheckMode::None)
    );
    assert_eq!((client.credit, client.low_water), (2 << 30, 128 << 10));
}

#[test]
fn every_option_of_the_original() {
    let server = settings("-s -m 7 -b 2 -p 5").unwrap();
    assert_eq!(server.buffer, 8192);
    assert!(matches!(
        server.role,
        Role::Server(Server { bytes: 0x70_0000, port }) if port == Port::new(5)
    ));
    let modes = [
        ("n", Mode::Copy),
        ("y", Mode::InPlace),
        ("u", Mode::InPlacePolling),
    ];
    for (letter, mode) in modes {
        let line = format!("-c 9 -b 3 -r 100 -v 70000 -z {letter} --device x --touch");
        let client = settings(&line).unwrap();
        assert_eq!(client.buffer, 3 * 4096);
        let Role::Client(client) = client.role else {
            panic!("{client:?}");
        };
        assert_eq!((client.mode, client.check_mode), (mode, CheckMode::Touch));
        assert_eq!((client.credit, client.low_water), (70_000, 100));
    }
}

#[test]
fn flags_select_the_kind_of_endpoint() {
    for (line, endpoint) in [
        ("-s", "Kernel"),
        ("-s --attach a", "Attach(\"a\")"),
        ("-c 2 -z u --device d", "Device(\"d\")"),
        (
            "-s --host --vm-socket v --vm-cid 0x5",
            "Host { vm: Some((Cid(5), \"v\")), attach: None }",
        ),
        (
            "-c 4 -z y --host --attach-socket a",
            "Host { vm: None, attach: Some(\"a\") }",
        ),
    ] {
        assert_eq!(format!("{:?}", settings(line).unwrap().endpoint), endpoint);
    }
}

#[test]
fn invalid_flag_combinations_are_refused_with_the_reason() {
    for (line, reason) in [
        ("", "--server"),
        ("-s -c 3", "cannot be used with"),
        ("-s -z y", "cannot be used with"),
        ("-s -r 5", "cannot be used with"),
        ("-c 3 -z x", "possible values"),
        ("-c 3 -z y", "no receive maps"),
        ("-c 3 -z u", "no receive maps"),
        ("-c 3 -b 0", "from 1 to 524287"),
        ("-c 3 -v 0", "credit"),
        ("-c 3 -v 1000 -r 1001", "never there at once"),
        ("-s -m -1", "unexpected argument"),
        ("-s -m x", "whole number"),
        ("-s --attach a --device b", "cannot be used with"),
        ("-s --host --device b", "cannot be used with"),
        ("-s --vm-socket b", "--host"),
        ("-s --host", "--vm-socket"),
        ("-s --host --vm-socket x --vm-cid 2", "--vm-cid 2"),
        ("-c any", "local or host"),
        ("-c 4294967295", "local or host"),
        ("-c 2 -p any", "4294967294"),
    ] {
        let said = settings(line).unwrap_err();
        assert!(said.contains(reason), "{line}: {said}");
    }
}
