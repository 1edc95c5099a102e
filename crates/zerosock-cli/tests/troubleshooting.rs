//! docs/troubleshooting.md: the messages that it has of zerosock are those of the code.

use std::fs;
use std::path::Path;

/// Appends the sources below `dir`, with string literals on several lines joined.
fn read_sources(dir: &Path, out: &mut String) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_sources(&path, out);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let mut joins = false;
            for line in text.lines() {
                let line = if joins { line.trim_start() } else { line };
                joins = line.ends_with('\\');
                out.push_str(line.trim_end_matches('\\'));
                if !joins {
                    out.push('\n');
                }
            }
        }
    }
}

#[test]
fn messages_of_zerosock_are_in_the_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut sources = String::new();
    for entry in fs::read_dir(root.join("crates")).unwrap() {
        let source = entry.unwrap().path().join("src");
        if source.is_dir() {
            read_sources(&source, &mut sources);
        }
    }
    let page = fs::read_to_string(root.join("docs/troubleshooting.md")).unwrap();
    let mut checked = 0;
    for section in page.split("\n## ").skip(1) {
        let (title, text) = section.split_once('\n').unwrap();
        if !title.contains("zerosock") {
            continue;
        }
        for row in text.lines().filter(|line| line.starts_with("| `")) {
            let message = row.split('`').nth(1).unwrap();
            for part in message
                .split('…')
                .map(str::trim)
                .filter(|part| part.len() > 3)
            {
                assert!(
                    sources.contains(part),
                    "no source has `{part}` of `{message}`"
                );
                checked += 1;
            }
        }
    }
    assert!(checked >= 30, "{checked} parts of messages");
}
