//! `zerosock bench` where it needs a guest. It boots its own: nothing is said about how fast
//! anything is, only that every row is there.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use serde_json::Value;
use zerosock_cli::vm::kernel::Kernel;
use zerosock_cli::vm::qemu;

use crate::Alone;
use crate::lab::{Skipped, cache, guest_program, short_dir, zerosock};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    (
        "rx_with_a_vm_has_rows_from_its_guest",
        rx_with_a_vm_has_rows_from_its_guest,
    ),
    (
        "rx_with_a_vm_that_cannot_be_had_says_why",
        rx_with_a_vm_that_cannot_be_had_says_why,
    ),
];

/// `zerosock bench rx` over a VM alone, as short as can be; its table.
fn bench(path: Option<&str>) -> Value {
    let dir = short_dir();
    let (figures, said) = (dir.path().join("figures"), dir.path().join("said"));
    let mut command = Command::new(zerosock());
    command
        .args(["bench", "rx", "--vm", "--quick", "--case", "VM", "--json"])
        .arg(&figures)
        .env("ZEROSOCK_GUEST", guest_program())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&said).expect("a file"));
    if let Some(path) = path {
        command.env("PATH", path);
    }
    let status = command.status().expect("zerosock bench");
    let said = fs::read_to_string(&said).expect("what it said");
    assert!(status.success(), "{said}");
    let text = fs::read_to_string(&figures).expect("figures");
    serde_json::from_str(&text).expect("JSON")
}

fn rx_with_a_vm_has_rows_from_its_guest() -> Result<(), Skipped> {
    if qemu::version().is_none() {
        return Err(Skipped(qemu::BootError::NoQemu.to_string()));
    }
    Kernel::debian(&cache(), "linux-image-6.12-cloud-amd64")
        .map_err(|error| Skipped(error.to_string()))?;
    let table = bench(None);
    assert_eq!(table["missing"], serde_json::json!([]));
    let method = table["method"].as_str().expect("a method");
    assert!(method.contains("a guest with Linux 6.12"), "{method}");
    let rows = table["rows"].as_array().expect("rows");
    let has = |name: &str, metric: &str| {
        let found = rows
            .iter()
            .find(|row| row["name"] == name && row["metric"] == metric);
        let row = found.unwrap_or_else(|| panic!("no {metric} of {name:?} in {rows:#?}"));
        assert!(
            row["ours"].as_f64().is_some_and(|figure| figure > 0.0),
            "{row}"
        );
        assert!(
            row["peer"].as_f64().is_some_and(|figure| figure > 0.0),
            "{row}"
        );
    };
    for size in ["4", "16", "64", "128", "256", "512"] {
        for way in ["in place", "in place, polling", "in place, untouched"] {
            has(&format!("VM to host, {size} KiB, {way}"), "dequeue");
        }
        has(&format!("VM to host, {size} KiB, in place"), "throughput");
        for metric in ["dequeue", "throughput"] {
            has(&format!("VM to guest, {size} KiB, from a loan"), metric);
        }
    }
    assert!(
        rows.iter()
            .all(|row| row["name"].as_str().expect("a name").starts_with("VM "))
    );
    Ok(())
}

/// Nobody is left out in silence: with nothing on the PATH there is no QEMU.
fn rx_with_a_vm_that_cannot_be_had_says_why() -> Result<(), Skipped> {
    let table = bench(Some("/nowhere"));
    assert_eq!(table["rows"], serde_json::json!([]));
    let missing = &table["missing"][0];
    assert_eq!(missing["name"], "VM");
    let reason = missing["reason"].as_str().expect("a reason");
    assert!(
        reason.contains("qemu-system-x86_64 is not installed"),
        "{reason}"
    );
    Ok(())
}
