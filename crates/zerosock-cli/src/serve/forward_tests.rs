//! Unit tests of `forward`.

use super::*;

fn read<T: for<'de> Deserialize<'de>>(text: &str) -> Result<Vec<T>, String> {
    serde_yaml_ng::from_str(text).map_err(|error| error.to_string())
}

#[test]
fn every_key_of_a_rule_is_read() {
    let rules: Vec<Forward> = read(
        "
- {port: 53, to: 'udp:127.0.0.1'}
- from: 3 + name:web
  port: 8000-8010
  to: tcp:example.com:80
  allow: [10.0.0.0/8, '::1']
  deny: 10.9.0.0/16
  connect_timeout: 0.5
  idle_timeout: 3600
  keepalive: 0
  proxy-protocol: true
  max_connections: 7
  zero_copy: never
",
    )
    .unwrap();
    let port = Port::new;
    let first = ForwardRule::new(port(53)..=port(53), "udp:127.0.0.1".parse().unwrap());
    assert_eq!(rules[0].0, first);
    let second = &rules[1].0;
    assert_eq!(second.from.len(), 2);
    assert_eq!(second.ports, port(8000)..=port(8010));
    assert_eq!(second.to.to_string(), "tcp:example.com:80");
    assert_eq!((second.allow.len(), second.deny.len()), (2, 1));
    assert_eq!(second.connect_timeout, Some(Duration::from_millis(500)));
    assert_eq!(second.idle_timeout, Some(Duration::from_secs(3600)));
    assert_eq!((second.keepalive, second.max_connections), (None, Some(7)));
    assert!(second.proxy_protocol);
    assert_eq!(second.zero_copy, ZeroCopy::Never);

    let rules: Vec<Listen> = read(
        "
- {on: 'tcp:[::]:2222', to: '3:22'}
- on: unix:/run/x
  to: name:web:80
  allow: 10.0.0.0/8
  idle_timeout: 5
  keepalive: 9
  proxy_protocol: true
  max_connections: 1
  zero-copy: always
  mode: '0660'
",
    )
    .unwrap();
    assert_eq!(rules[0], parse_listen("tcp:[::]:2222=3:22").unwrap());
    assert_eq!(rules[1].mode, Some(Mode::from_raw_mode(0o660)));
    assert_eq!(rules[1].keepalive, Some(Duration::from_secs(9)));
    assert!(rules[1].proxy_protocol && !rules[0].proxy_protocol);
    assert_eq!(rules[1].rule(None).zero_copy, ZeroCopy::Always);
}

#[test]
fn errors_name_the_value() {
    for (text, wanted) in [
        ("- {port: x, to: 'unix:/a'}", "`x` is no port"),
        ("- {port: 1, to: 'a'}", "a"),
        ("- {port: 1}", "missing field `to`"),
        ("- {port: 1, to: 'unix:/a', allow: x}", "x"),
        (
            "- {port: 1, to: 'unix:/a', idle_timeout: 0}",
            "give seconds",
        ),
        (
            "- {port: 1, to: 'unix:/a', max_connections: 0}",
            "give at least 1",
        ),
        (
            "- {port: 1, to: 'unix:/a', zero_copy: on}",
            "give auto, always or never",
        ),
        (
            "- {port: 1, to: 'unix:/a', form: 3}",
            "unknown field `form`",
        ),
    ] {
        let error = read::<Forward>(text).unwrap_err();
        assert!(error.contains(wanted), "{text}: {error}");
    }
    for (text, wanted) in [
        ("- {on: 'tcp:80', to: '3:1'}", "no IP address and port"),
        ("- {on: 'unix:/a', to: '3'}", "has no port"),
        ("- {on: 'unix:/a', to: '3:1', mode: '9'}", "permission bits"),
    ] {
        let error = read::<Listen>(text).unwrap_err();
        assert!(error.contains(wanted), "{text}: {error}");
    }
}

#[test]
fn flags_are_short_rules() {
    let rule = parse_forward("0x50-81=tcp:[::1]").unwrap();
    assert_eq!(rule.ports, Port::new(80)..=Port::new(81));
    assert_eq!(rule.to.to_string(), "tcp:[::1]");
    for text in ["80", "x=tcp:a:1", "80=", "80=tcp"] {
        assert!(parse_forward(text).is_err(), "{text}");
    }
    let listen = parse_listen("unix:/a=b=host:80").unwrap();
    assert_eq!(listen.on.to_string(), "unix:/a=b");
    for text in ["tcp:1.2.3.4:5", "tcp:1.2.3.4=3:1", "unix:/a=3"] {
        assert!(parse_listen(text).is_err(), "{text}");
    }
}
