//! Unit tests of `cpus`.

use super::*;

#[test]
fn numbers_and_ranges() {
    assert_eq!(parse_list("0"), Ok(vec![0]));
    assert_eq!(parse_list("4,0-2"), Ok(vec![4, 0, 1, 2]));
    assert_eq!(parse_list("3-3"), Ok(vec![3]));
}

#[test]
fn nonsense_is_refused() {
    for text in [
        "",
        ",",
        "a",
        "1-",
        "-1",
        "2-1",
        "0,,1",
        "1024",
        "0-99999999999",
    ] {
        assert!(
            matches!(parse_list(text), Err(CpusError::Malformed(_))),
            "{text:?}"
        );
    }
    assert_eq!(parse_list("0-2,1"), Err(CpusError::Twice(1)));
}

#[test]
fn a_cpu_we_may_not_use_is_refused_with_those_we_may() {
    let mut allowed = CpuSet::new();
    allowed.set(1);
    allowed.set(3);
    assert_eq!(parse_within("3,1", &allowed), Ok(vec![3, 1]));
    assert_eq!(
        parse_within("0-1", &allowed),
        Err(CpusError::NotAllowed {
            cpu: 0,
            allowed: "1,3".into()
        })
    );
}
