//! A short one of the long run (`make soak`), so that it stays usable.

use std::process::Command;

#[test]
fn a_short_run_passes() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("soak.html");
    let mut soak = Command::new(env!("CARGO_BIN_EXE_zerosock-testkit"));
    soak.args(["soak", "--minutes", "0.33", "--seed", "32", "--page"]);
    let output = soak.arg(&page).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    for kind in ["kill", "upgrade", "reload", "guest reset"] {
        assert!(text.contains(&format!("× {kind}")), "{text}");
    }
    assert!(std::fs::read_to_string(page).unwrap().contains("<polyline"));
}
