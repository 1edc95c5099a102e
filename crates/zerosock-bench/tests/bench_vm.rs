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

/// Guests, seven in `net`, may be emulated on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Runs a table over a VM only, as short as possible; returns it.
fn bench(table: &str, path: Option<&str>) -> Value {
    bench_cases(table, &["VM"], path)
}

/// Runs the cases of a table with one of these texts in their name.
fn bench_cases(table: &str, cases: &[&str], path: Option<&str>) -> Value {
    let dir = tempfile::tempdir().expect("a directory");
    let (figures, said) = (dir.path().join("figures"), dir.path().join("said"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_zerosock-bench"));
    command
        .args([table, "--vm", "--quick", "--json"])
        .arg(&figures)
        .args(cases.iter().flat_map(|case| ["--case", case]))
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

/// Says why no guest can be booted, if so.
fn lacks_guests(name: &str) -> bool {
    let lacking = if qemu::version().is_none() {
        Some(qemu::BootError::NoQemu.to_string())
    } else {
        let kernel = Kernel::debian(&Cache::find(), "linux-image-6.12-cloud-amd64");
        kernel.err().map(|error| error.to_string())
    };
    if let Some(reason) = &lacking {
        let _ = writeln!(std::io::stdout(), "\nSKIPPED vm: {name}: {reason}");
    }
    lacking.is_some()
}

/// Checks that a row has two figures.
fn has_figures(table: &Value, name: &str, metric: &str) {
    let rows = table["rows"].as_array().expect("rows");
    let is_it = |row: &&Value| row["name"] == name && row["metric"] == metric;
    let row = rows.iter().find(is_it);
    let row = row.unwrap_or_else(|| panic!("no {metric} of {name:?} in {rows:#?}"));
    for figure in ["ours", "peer"] {
        let figure = row[figure].as_f64();
        assert!(figure.is_some_and(|figure| figure > 0.0), "{row}");
    }
}

/// Only the smallest and the largest size, for time.
#[test]
fn rx_with_a_vm_has_rows_from_its_guest() {
    if lacks_guests("rx_with_a_vm_has_rows_from_its_guest") {
        return;
    }
    let sizes = ["4 KiB", "512 KiB"];
    let to_host = sizes.map(|size| format!("VM to host, {size}"));
    let to_guest = sizes.map(|size| format!("VM to guest, {size}"));
    let cases: Vec<&str> = to_host
        .iter()
        .chain(&to_guest)
        .map(String::as_str)
        .collect();
    let table = bench_cases("rx", &cases, None);
    assert_eq!(table["missing"], serde_json::json!([]));
    let method = table["method"].as_str().expect("a method");
    assert!(method.contains("a guest with Linux 6.12"), "{method}");
    let has = |case: &str, way: &str, metrics: &[&str]| {
        for metric in metrics {
            has_figures(&table, &format!("{case}, {way}"), metric);
        }
    };
    for case in &to_host {
        has(case, "in place", &["dequeue", "throughput"]);
        has(case, "in place, polling", &["dequeue"]);
        has(case, "in place, untouched", &["dequeue"]);
        for way in ["copying", "in place", "in place, polling"] {
            let way = format!("from an endpoint, {way}");
            has(case, &way, &["dequeue", "throughput"]);
        }
    }
    for case in &to_guest {
        has(case, "from a loan", &["dequeue", "throughput"]);
        for way in ["copying", "in place", "in place, polling"] {
            has(
                case,
                &format!("endpoint, {way}"),
                &["dequeue", "throughput"],
            );
        }
    }
    check_grids(&table);
}

/// Our lines of the tables in the form of the kernel's patch set are filled in where something was measured.
fn check_grids(table: &Value) {
    let grids = table["grids"].as_array().expect("grids");
    assert_eq!(grids.len(), 2, "{grids:#?}");
    for grid in grids {
        let lines = grid["lines"].as_array().expect("lines");
        let (theirs, ours): (Vec<_>, Vec<_>) = lines.iter().partition(|line| {
            let way = line["way"].as_str().expect("a way");
            way.starts_with("patch set: ")
        });
        assert!(ours.len() >= 4 * 3 && theirs.len() == 2 * 3, "{grid:#}");
        for line in ours {
            let figures = if line["figure"] == "A / B, s" { 2 } else { 1 };
            let counts = [figures, 0, 0, 0, 0, figures];
            for (cell, count) in line["cells"].as_array().expect("cells").iter().zip(counts) {
                let cell = cell.as_array().expect("figures");
                let is_one = |figure: &Value| figure.as_f64().is_some_and(|it| it > 0.0);
                assert!(cell.len() == count && cell.iter().all(is_one), "{line}");
            }
        }
    }
}

#[test]
fn local_with_a_vm_has_rows_from_its_guest() {
    if lacks_guests("local_with_a_vm_has_rows_from_its_guest") {
        return;
    }
    let table = bench("local", None);
    assert_eq!(table["missing"], serde_json::json!([]));
    for waiting in ["spinning", "sleeping"] {
        let name = format!("VM, one way, 64 B, {waiting}");
        has_figures(&table, &name, "one-way latency");
    }
    assert_eq!(table["rows"].as_array().map(Vec::len), Some(2), "{table:#}");
}

/// Without QEMU (an empty PATH) the rows are reported as missing.
#[test]
fn rx_without_a_vm_reports_the_reason() {
    let table = bench("rx", Some("/nowhere"));
    assert_eq!(table["rows"], serde_json::json!([]));
    let missing = &table["missing"][0];
    assert_eq!(missing["name"], "VM");
    let reason = missing["reason"].as_str().expect("a reason");
    assert!(
        reason.contains("qemu-system-x86_64 is not installed"),
        "{reason}"
    );
}

/// Every relay in the guest has figures, and what does not go is missing with its reason.
#[test]
fn relay_with_a_vm_has_rows_from_its_guest() {
    if lacks_guests("relay_with_a_vm_has_rows_from_its_guest") {
        return;
    }
    let table = bench("relay", None);
    let missing = |name: &str, reason: &str| {
        let missing = table["missing"].as_array().expect("an array");
        missing.iter().any(|one| {
            one["name"] == name && one["reason"].as_str().is_some_and(|it| it.contains(reason))
        })
    };
    assert!(missing("zerosock --way splice", "the way copy"), "{table}");
    assert!(missing("zerosock --way sockmap", "the way copy"), "{table}");
    let has_socat = !missing("socat in the guest", "");
    let rows = table["rows"].as_array().expect("rows");
    for (to, ways) in [("TCP", &["copy", "sockmap"][..]), ("Unix", &["copy"])] {
        for side in ["virtio", "loopback"] {
            let name = format!("VM vsock to {to}, {side}, 64 KiB");
            let peers = ways.iter().map(|way| format!("zerosock --way {way}"));
            let socat = has_socat.then(|| "socat -b 8192".to_owned());
            for peer in peers.chain(socat) {
                let found = rows.iter().find(|row| {
                    row["name"] == name.as_str()
                        && row["metric"] == "throughput"
                        && row["peer_name"] == peer.as_str()
                });
                let row = found.unwrap_or_else(|| panic!("no {name}, {peer}: {table}"));
                assert!(row["ours"].is_number() && row["peer"].is_number(), "{row}");
            }
        }
    }
    for side in ["virtio", "loopback"] {
        for metric in ["throughput", "CPU of the guest", "datagrams that arrive"] {
            let name = format!("VM UDP to vsock, {side}, 1400 B");
            let row = rows.iter().find(|row| {
                row["name"] == name.as_str()
                    && row["metric"] == metric
                    && row["peer_name"] == "a copying loop"
            });
            assert!(row.is_some_and(|row| row["ours"].is_number()), "{table}");
        }
    }
}

/// What a table says is missing, with this name.
fn reason<'t>(table: &'t Value, name: &str) -> Option<&'t str> {
    let missing = table["missing"].as_array().expect("an array");
    let found = missing
        .iter()
        .find(|one| one["name"].as_str().is_some_and(|it| it.starts_with(name)));
    found.map(|one| one["reason"].as_str().expect("a reason"))
}

/// Checks that `net` has figures of zerosock and of a peer.
fn check_net(table: &Value, name: &str, metric: &str, peer: &str) {
    let rows = table["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| {
        let peer_name = row["peer_name"].as_str().expect("a name");
        row["name"] == name && row["metric"] == metric && peer_name.starts_with(peer)
    });
    let row = row.unwrap_or_else(|| panic!("no {metric} of {name}, {peer}: {table:#}"));
    assert!(row["ours"].is_number(), "{row}: {table:#}");
    let is_missing = reason(table, peer).is_some();
    assert_eq!(row["peer"].is_number(), !is_missing, "{row}: {table:#}");
}

/// Says why `net` has no guests, if so.
fn lacks_net(table: &Value, name: &str) -> bool {
    let lacking = ["namespace", "VM", "user-mode Linux"].map(|what| reason(table, what));
    let lacking = lacking.into_iter().flatten().next();
    if let Some(reason) = lacking {
        let _ = writeln!(std::io::stdout(), "\nSKIPPED network: {name}: {reason}");
    }
    lacking.is_some()
}

/// Every back-end that the machine has has figures: QEMU's own always.
#[test]
fn net_with_a_vm_has_rows_from_its_guests() {
    let name = "net_with_a_vm_has_rows_from_its_guests";
    if lacks_guests(name) {
        return;
    }
    let table = bench("net", None);
    if lacks_net(&table, name) {
        return;
    }
    for peer in ["QEMU tap", "QEMU -netdev socket", "QEMU tap, bridge"] {
        assert_eq!(reason(&table, peer), None);
    }
    for peer in ["QEMU tap", "DPDK", "passt --vhost-user"] {
        for case in ["VM to host, TCP", "host to VM, TCP"] {
            check_net(&table, case, "throughput", peer);
            check_net(&table, case, "CPU outside the processors", peer);
            check_net(&table, case, "CPU of the back-end", peer);
        }
        check_net(&table, "VM and host, ping", "round trip p50", peer);
    }
    for peer in ["QEMU -netdev socket", "QEMU tap, bridge"] {
        check_net(&table, "VM to VM, TCP", "throughput", peer);
        check_net(&table, "VM to VM, TCP", "CPU outside the processors", peer);
        check_net(&table, "VM and VM, ping", "round trip p50", peer);
    }
}

#[test]
fn net_has_rows_of_user_mode_linux() {
    let table = bench_cases("net", &["user-mode Linux"], None);
    if lacks_net(&table, "net_has_rows_of_user_mode_linux") {
        return;
    }
    let peer = "vector driver on TAP";
    assert_eq!(reason(&table, peer), None);
    for case in [
        "user-mode Linux to host, TCP",
        "host to user-mode Linux, TCP",
    ] {
        check_net(&table, case, "throughput", peer);
    }
    check_net(
        &table,
        "user-mode Linux and host, ping",
        "round trip p50",
        peer,
    );
}
