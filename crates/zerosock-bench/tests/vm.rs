//! `zerosock-bench` with a guest that it boots. Only the existence of rows is checked, no figures.
//! `ZEROSOCK_GUEST` names the program taken into the guest.

use std::fs::{self, File};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use zerosock_cli::vm::cache::Cache;
use zerosock_cli::vm::children::Guarded;
use zerosock_cli::vm::kernel::Kernel;
use zerosock_cli::vm::qemu;

/// The guest may be emulated on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs `zerosock-bench rx` over a VM only, as short as possible; returns its table.
fn bench(path: Option<&str>) -> Value {
    let dir = tempfile::tempdir().expect("a directory");
    let (figures, said) = (dir.path().join("figures"), dir.path().join("said"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_zerosock-bench"));
    command
        .args(["rx", "--vm", "--quick", "--case", "VM", "--json"])
        .arg(&figures)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&said).expect("a file"));
    if let Some(path) = path {
        command.env("PATH", path);
    }
    let status = Guarded::spawn(&mut command)
        .expect("zerosock-bench")
        .wait(PATIENCE);
    let said = fs::read_to_string(&said).expect("what it said");
    assert!(status.is_some_and(|status| status.success()), "{said}");
    let text = fs::read_to_string(&figures).expect("figures");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn rx_with_a_vm_has_rows_from_its_guest() {
    let lacking = if qemu::version().is_none() {
        Some(qemu::BootError::NoQemu.to_string())
    } else {
        let kernel = Kernel::debian(&Cache::find(), "linux-image-6.12-cloud-amd64");
        kernel.err().map(|error| error.to_string())
    };
    if let Some(reason) = lacking {
        let name = "rx_with_a_vm_has_rows_from_its_guest";
        let _ = writeln!(std::io::stdout(), "\nSKIPPED vm: {name}: {reason}");
        return;
    }
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
}

/// Without QEMU (an empty PATH) the rows are reported as missing.
#[test]
fn rx_without_a_vm_reports_the_reason() {
    let table = bench(Some("/nowhere"));
    assert_eq!(table["rows"], serde_json::json!([]));
    let missing = &table["missing"][0];
    assert_eq!(missing["name"], "VM");
    let reason = missing["reason"].as_str().expect("a reason");
    assert!(
        reason.contains("qemu-system-x86_64 is not installed"),
        "{reason}"
    );
}
