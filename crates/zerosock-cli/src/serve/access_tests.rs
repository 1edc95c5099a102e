//! Unit tests of `access`.

use super::*;

fn read(text: &str) -> Result<Vec<AccessEntry>, String> {
    serde_yaml_ng::from_str(text).map_err(|error| error.to_string())
}

fn cids(first: u32, last: u32) -> Party {
    Party::Cids(Cids::new(Cid::new(first), Cid::new(last)).unwrap())
}

#[test]
fn rules_are_read_in_their_order() {
    let entries = read(
        "
- allow: {from: 'name:web', to: 'group:db', ports: 5432}
- deny:
    from: [any]
    to: [host, 3, 5-9, 'group:a b']
    ports: [22, 6000-6010]
- allow: {from: host + 4, to: any}
- deny: {from: '0x7', to: any, ports: 1+0x2}
",
    )
    .unwrap();
    let port = Port::new;
    let wanted = AccessList::new([
        Rule {
            name: None,
            verdict: Verdict::Allow,
            from: vec![Party::Name("web".parse().unwrap())],
            to: vec![Party::Group("db".into())],
            ports: Ports::one(port(5432)).unwrap(),
        },
        Rule {
            name: None,
            verdict: Verdict::Deny,
            from: vec![Party::Any],
            to: vec![
                Party::Host,
                cids(3, 3),
                cids(5, 9),
                Party::Group("a b".into()),
            ],
            ports: Ports::new([port(22)..=port(22), port(6000)..=port(6010)]).unwrap(),
        },
        Rule {
            name: None,
            verdict: Verdict::Allow,
            from: vec![Party::Host, cids(4, 4)],
            to: vec![Party::Any],
            ports: Ports::all(),
        },
        Rule {
            name: None,
            verdict: Verdict::Deny,
            from: vec![cids(7, 7)],
            to: vec![Party::Any],
            ports: Ports::new([port(1)..=port(1), port(2)..=port(2)]).unwrap(),
        },
    ]);
    assert_eq!(
        unknown_group(
            entries.iter().map(AccessEntry::parties),
            &BTreeSet::from(["db", "a b"])
        ),
        None
    );
    let known = BTreeSet::from(["db"]);
    assert_eq!(
        unknown_group(entries.iter().map(AccessEntry::parties), &known),
        Some((1, "a b"))
    );
    assert_eq!(list(entries), wanted);
}

#[test]
fn errors_name_value_and_line() {
    let rule = |from: &str, to: &str, ports: &str| {
        format!(
            "- allow: {{from: any, to: any}}\n- deny: {{from: {from}, to: {to}, ports: {ports}}}"
        )
    };
    for (text, wanted) in [
            (rule("hosts", "any", "1"), "`hosts` names no endpoint; give any, host, a CID"),
            (rule("any", "2", "1"), "`2` is the host: write `host`"),
            (rule("any", "0-9", "1"), "`0-9` has a reserved CID"),
            (rule("any", "local", "1"), "`local` has a reserved CID"),
            (rule("any", "3-any", "1"), "`3-any` has a reserved CID"),
            (rule("any", "9-8", "1"), "`9-8` the last comes before the first"),
            (rule("any", "5+", "1"), "`` names no endpoint"),
            (rule("any", "'name:a b'", "1"), "`name:a b` names no process: a name has"),
            (rule("any", "'group:'", "1"), "`group:` names no endpoint"),
            (rule("any", "any", "ssh"), "ports: `ssh` is not a port; give a port"),
            (rule("any", "any", "1+-2"), "ports: `-2` is not a port"),
            (rule("any", "any", "7-6"), "ports: `7-6` is not a range"),
            (rule("any", "any", "4294967295"), "ports: `4294967295` is not a range: an end"),
            (rule("any", "any", "4294967296"), "ports: `4294967296` is not a port"),
            (rule("any", "any", "[]"), "ports: `` is not a port"),
            ("- allow: {from: any, to: any}\n- deny: {from: any}".into(), "missing field `to`"),
            ("- allow: {from: any, to: any}\n- {}".into(), "neither `allow` nor `deny`"),
            ("- allow: {from: any, to: any}\n- permit: {}".into(), "unknown field `permit`"),
            (
                "- allow: {from: any, to: any}\n- {allow: {from: any, to: any}, deny: {from: any, to: any}}"
                    .into(),
                "`deny` beside another rule",
            ),
        ] {
            let error = read(&text).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
            assert!(error.contains("line 2"), "{text}: {error}");
        }
}
