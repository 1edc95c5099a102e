//! `zerosock-bench` as a process: every row exists, missing peers are named, and the JSON has the
//! documented shape. No figure is checked.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;
use zerosock_cli::vm::children::Guarded;

/// Serialises the tests: each spins on both cores.
static TURN: Mutex<()> = Mutex::new(());

/// A table is dozens of measurements, each with its own processes, on a machine that may be busy.
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs `zerosock-bench ARGUMENTS --quick --json FILE` without installed peers.
fn bench(arguments: &[&str]) -> (Value, String) {
    let (status, figures, tables, errors) = run(arguments);
    assert!(status.success(), "{status}: {errors}");
    (figures, tables)
}

/// As [`bench`], with the exit status and standard error.
fn run(arguments: &[&str]) -> (ExitStatus, Value, String, String) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let at = |name| dir.path().join(name);
    let (file, tables, errors) = (at("figures.json"), at("tables"), at("errors"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_zerosock-bench"));
    command
        .args(arguments)
        .args(["--quick", "--json"])
        .arg(&file)
        .env("ZEROSOCK_CACHE", dir.path())
        .env("ZEROSOCK_PEER_ICEORYX2", at("nowhere"))
        .env("VHOST_DEVICE_VSOCK", at("nowhere"))
        .env("HAPROXY", at("nowhere"))
        .env("IPERF3", at("nowhere"))
        .stdin(Stdio::null())
        .stdout(File::create(&tables).unwrap())
        .stderr(File::create(&errors).unwrap());
    let status = Guarded::spawn(&mut command).unwrap().wait(PATIENCE);
    let errors = fs::read_to_string(errors).unwrap();
    let status = status.unwrap_or_else(|| panic!("no end within {PATIENCE:?}: {errors}"));
    // No lines of progress: standard error is no terminal.
    assert!(!errors.contains("round 1"), "{errors}");
    let tables = fs::read_to_string(tables).unwrap();
    assert!(
        tables.contains("Quick: ") && tables.contains("One round: "),
        "{tables}"
    );
    (status, json(&file), tables, errors)
}

fn json(file: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

/// Checks the rows of any table.
fn check_rows(table: &Value) {
    assert!(table["machine"].as_str().unwrap().contains("Linux"));
    let rows = table["rows"].as_array().unwrap();
    assert!(!rows.is_empty());
    for row in rows {
        for key in ["name", "metric", "unit", "peer_name"] {
            assert!(row[key].is_string(), "{key} of {row}");
        }
        let higher = row["higher_is_better"].as_bool().unwrap();
        let figures = (row["ours"].as_f64(), row["peer"].as_f64());
        match figures {
            (Some(ours), Some(peer)) => {
                assert!(ours > 0.0 && peer > 0.0, "{row}");
                let ratio = row["ratio"].as_f64().unwrap();
                let (better, worse) = if higher { (ours, peer) } else { (peer, ours) };
                assert_eq!(ratio.partial_cmp(&1.0), better.partial_cmp(&worse), "{row}");
                assert!(row["missing"].is_null());
            }
            _ => {
                assert!(row["ratio"].is_null(), "{row}");
                assert!(row["missing"].is_string(), "{row}");
            }
        }
        for side in ["ours", "peer"].map(|side| (row[side].as_f64(), side)) {
            if let (Some(median), side) = side {
                let best = row[format!("{side}_best")].as_f64().unwrap();
                let slowest = row[format!("{side}_slowest")].as_f64().unwrap();
                let (least, most) = if higher {
                    (slowest, best)
                } else {
                    (best, slowest)
                };
                assert!(least <= median && median <= most, "{row}");
            }
        }
    }
}

fn is_missing(table: &Value, name: &str) -> bool {
    let missing = table["missing"].as_array().unwrap();
    missing
        .iter()
        .any(|one| one["name"].as_str().unwrap().starts_with(name) && one["reason"].is_string())
}

#[test]
fn local_has_a_row_for_every_peer_and_names_the_missing() {
    let (table, text) = bench(&["local"]);
    assert_eq!(table["table"], "local");
    check_rows(&table);
    assert!(is_missing(&table, "iceoryx2"), "{}", table["missing"]);
    assert!(text.contains("missing: iceoryx2"), "{text}");
    let rows = table["rows"].as_array().unwrap();
    for metric in [
        "one-way latency",
        "round trip",
        "messages per second",
        "throughput",
    ] {
        for peer in ["Unix stream", "TCP loopback", "pipe"] {
            let row = rows
                .iter()
                .find(|row| row["metric"] == metric && row["peer_name"] == peer);
            let row = row.unwrap_or_else(|| panic!("no {metric} against {peer}"));
            assert!(
                row["peer"].as_f64().is_some_and(|figure| figure > 0.0),
                "{row}"
            );
        }
    }
    for name in [
        "throughput, 4 KiB",
        "throughput, 64 KiB",
        "throughput, 1 MiB",
    ] {
        assert!(text.contains(name), "{text}");
    }
}

#[test]
fn device_measures_ourselves_and_the_ceiling_without_its_peer() {
    let (table, text) = bench(&["device"]);
    check_rows(&table);
    assert!(is_missing(&table, "vhost-device-vsock"));
    let rows = table["rows"].as_array().unwrap();
    assert!(rows.iter().all(|row| row["ours"].is_number()), "{rows:?}");
    let has = |name: &str, metric: &str, peer: &str| {
        rows.iter().any(|row| {
            let peer_name = row["peer_name"].as_str().unwrap();
            row["name"] == name && row["metric"] == metric && peer_name.starts_with(peer)
        })
    };
    for size in ["64 B", "512 B", "4 KiB", "64 KiB"] {
        for name in [
            format!("to host, packets of {size}"),
            format!("to guest, writes of {size} into 4 KiB buffers"),
            format!("to guest, writes of {size} into 64 KiB buffers"),
        ] {
            assert!(has(&name, "throughput", "bare Unix socket"), "{name}");
            assert!(has(&name, "device CPU", "vhost-device-vsock"), "{name}");
        }
    }
    for metric in ["round trip p50", "round trip p99"] {
        assert!(has("round trip, 64 B", metric, "bare Unix socket"));
        assert!(text.contains(metric), "{text}");
    }
}

/// The rows of a comparison with this program itself, and with one that can do nothing.
fn check_comparison(table: &Value, own: &str, other: &str) {
    let rows = table["rows"].as_array().unwrap();
    for (peer, is_there) in [(own, true), (other, false)] {
        let mut rows = rows
            .iter()
            .filter(|row| row["peer_name"] == peer)
            .peekable();
        assert!(rows.peek().is_some(), "{table}");
        for row in rows {
            assert!(row["ours"].is_number(), "{row}");
            assert_eq!(row["peer"].is_number(), is_there, "{row}");
        }
    }
    assert!(is_missing(table, other), "{table}");
}

#[test]
fn releases_are_compared_in_each_placement() {
    let own = fs::canonicalize(env!("CARGO_BIN_EXE_zerosock-bench")).unwrap();
    let other = fs::canonicalize("/bin/false").unwrap();
    let (own, other) = (own.to_str().unwrap(), other.to_str().unwrap());
    let binaries = ["--against-binary", own, "--against-binary", other];
    let cores = std::thread::available_parallelism().unwrap().get();
    for (table, case, placements) in [
        ("device", "to host, packets of 512 B", 3),
        ("local", "one way, 64 B, sleeping", 2),
        ("relay", "TCP to TCP, 64 B and back", 3),
    ] {
        let (tables, text) = bench(&[&[table, "--case", case][..], &binaries].concat());
        let tables = match tables {
            Value::Array(tables) => tables,
            table => vec![table],
        };
        assert_eq!(
            tables.len(),
            if cores > 1 { placements } else { 1 },
            "{text}"
        );
        for table in &tables {
            assert!(table["placement"].is_string(), "{table}");
            check_comparison(table, own, other);
        }
        assert!(text.contains(&format!("below 0.97 of {own}: ")), "{text}");
        assert!(
            text.contains(&format!("below 0.97 of {other}: 0 of 0 rows")),
            "{text}"
        );
    }
}

/// Each release measures its rings itself, once for all placements.
#[test]
fn rings_are_compared_in_the_first_placement() {
    let own = env!("CARGO_BIN_EXE_zerosock-bench");
    let case = "rings, 64 B, there and back";
    let (tables, text) = bench(&["net", "--case", case, "--against-binary", own]);
    let tables = match tables {
        Value::Array(tables) => tables,
        table => vec![table],
    };
    if is_missing(&tables[0], "namespace") {
        let missing = &tables[0]["missing"];
        let _ = writeln!(std::io::stdout(), "\nSKIPPED network: bench net: {missing}");
        return;
    }
    let rows = tables
        .iter()
        .flat_map(|table| table["rows"].as_array().unwrap());
    let rows: Vec<_> = rows.collect();
    assert_eq!(rows.len(), 1, "{text}");
    let has_cores = std::thread::available_parallelism().unwrap().get() > 1;
    assert_eq!(rows[0]["ratio"].is_number(), has_cores, "{text}");
}

/// No ratio of a program and itself is above 1000, and one round has no interval.
#[test]
fn a_loss_fails_the_run_on_request_only() {
    let own = env!("CARGO_BIN_EXE_zerosock-bench");
    let case = "to host, packets of 4 KiB";
    let words = [
        "device",
        "--case",
        case,
        "--against-binary",
        own,
        "--fail-below",
        "1000",
    ];
    let (status, _, text, errors) = run(&words);
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(errors.contains("ratios are below 1000"), "{errors}");
}

#[test]
fn rx_has_a_row_for_every_size_and_way() {
    let (table, _) = bench(&["rx"]);
    check_rows(&table);
    let rows = table["rows"].as_array().unwrap();
    for size in ["4", "16", "64", "128", "256", "512"] {
        for way in [
            "in place",
            "in place, shown",
            "in place, polling",
            "in place, untouched",
        ] {
            let end = format!(", {size} KiB, {way}");
            let found = rows.iter().any(|row| {
                row["name"].as_str().unwrap().ends_with(&end) && row["ratio"].is_number()
            });
            assert!(found, "{end} in {rows:#?}");
        }
    }
}

/// A slow reader that stopped the other connection would end the run with an error.
#[test]
fn hold_measures_with_and_without_a_slow_reader() {
    let (table, _) = bench(&["hold"]);
    check_rows(&table);
    let rows = table["rows"].as_array().unwrap();
    for direction in ["to host", "to guest"] {
        for size in ["64 B", "4 KiB", "64 KiB"] {
            let name = format!("{direction}, {size}, beside a slow reader");
            let found = rows.iter().find(|row| row["name"] == name);
            let row = found.unwrap_or_else(|| panic!("{name} in {rows:#?}"));
            assert!(row["ratio"].is_number(), "{row}");
        }
    }
}

#[test]
fn scale_has_its_rows_and_leaves_no_processes_or_files() {
    let (table, text) = bench(&["scale"]);
    check_rows(&table);
    assert!(is_missing(&table, "vhost-device-vsock"));
    let rows = table["rows"].as_array().unwrap();
    for (name, metric, has_peer) in [
        ("connections between two processes", "resident memory", true),
        ("connections with a socket each", "resident memory", false),
        (
            "1000 connections beside one bulk stream",
            "round trip p99",
            true,
        ),
        ("guest to host", "connects and closes", false),
        ("64 B, --spin-us 50", "round trip p50", true),
    ] {
        let found = rows
            .iter()
            .find(|row| row["name"].as_str().unwrap().ends_with(name) && row["metric"] == metric);
        let row = found.unwrap_or_else(|| panic!("no {name} in {rows:#?}"));
        assert!(row["ours"].is_number(), "{row}");
        assert_eq!(row["peer"].is_number(), has_peer, "{row}");
    }
    let bare = rows
        .iter()
        .filter(|row| row["peer_name"] == "bare Unix socket");
    assert_eq!(bare.filter(|row| row["ratio"].is_number()).count(), 2);
    let gone = "connections 0, ends 0, timers 0, ports 0";
    assert!(text.contains(gone), "{text}");
}

#[test]
fn dgram_has_a_row_for_every_size_and_number_of_senders() {
    let (table, _) = bench(&["dgram"]);
    assert_eq!(table["table"], "dgram");
    check_rows(&table);
    let rows = table["rows"].as_array().unwrap();
    let cores = std::thread::available_parallelism().unwrap().get();
    let senders = match cores {
        1 => vec!["one sender".to_owned()],
        cores => vec!["one sender".to_owned(), format!("{cores} senders")],
    };
    for size in ["64 B", "1 KiB", "4 KiB", "32 KiB"] {
        for senders in &senders {
            for way in ["sleeping", "sleeping, recv_each"] {
                let name = format!("{size}, {senders}, {way}");
                let found = rows.iter().find(|row| row["name"] == name);
                let row = found.unwrap_or_else(|| panic!("{name} in {rows:#?}"));
                assert_eq!(row["peer_name"], "UDP loopback");
                assert!(row["ratio"].is_number(), "{row}");
            }
        }
    }
}

/// Measures through socat if it is installed.
#[test]
fn relay_has_a_row_for_every_pair_of_sockets_and_names_the_missing() {
    let (table, text) = bench(&["relay"]);
    assert_eq!(table["table"], "relay");
    check_rows(&table);
    assert!(is_missing(&table, "haproxy"), "{text}");
    let rows = table["rows"].as_array().unwrap();
    assert!(rows.iter().all(|row| row["ours"].is_number()), "{text}");
    assert!(is_missing(&table, "vhost-device-vsock"), "{text}");
    let peer = |name: &str, metric: &str, peer: &str| {
        let found = rows
            .iter()
            .find(|row| row["name"] == name && row["metric"] == metric && row["peer_name"] == peer);
        let row = found.unwrap_or_else(|| panic!("no {name}, {metric}, {peer} in {text}"));
        row["peer"].is_number()
    };
    let has_socat = !is_missing(&table, "socat");
    if !has_socat {
        let _ = writeln!(std::io::stdout(), "\nSKIPPED socat: {}", table["missing"]);
    }
    for (name, metric, is_one_kind) in [
        ("TCP to TCP, 64 KiB", "throughput", true),
        ("Unix to TCP, 64 KiB", "throughput", false),
        ("TCP to Unix, 64 KiB", "throughput", false),
        ("Unix to Unix, 64 KiB", "throughput", true),
        ("TCP to TCP, 8 KiB", "throughput", true),
        ("UDP to UDP, 1400 B", "datagrams", true),
        ("UDP to UDP, 64 B", "datagrams", true),
    ] {
        for metric in [metric, "CPU of all"] {
            for socat in ["socat -b 8192", "socat -b 262144"] {
                assert_eq!(peer(name, metric, socat), has_socat, "{name}: {text}");
            }
            if is_one_kind {
                assert!(peer(name, metric, "direct connection"), "{name}: {text}");
            }
            assert!(peer(name, metric, "zerosock --way copy"), "{name}: {text}");
            if name.starts_with("UDP") {
                // Needs capabilities.
                peer(name, metric, "zerosock --way sockmap");
            }
        }
    }
    for name in [
        "TCP to TCP, 64 B and back",
        "TCP to TCP, 64 B and back, two cores",
        "Unix to Unix, 64 B and back",
    ] {
        for metric in ["round trip p50", "round trip p99"] {
            assert_eq!(peer(name, metric, "socat -b 8192"), has_socat, "{name}");
            assert!(peer(name, metric, "direct connection"), "{name}");
        }
    }
    assert!(peer("200 idle connections", "user memory", "the bound"));
    assert!(!peer("200 idle connections", "user memory", "haproxy"));
    assert!(!peer(
        "after 2000 short connections",
        "user memory",
        "haproxy"
    ));
    let socat = peer("short connections", "connects and closes", "socat -b 8192");
    assert_eq!(socat, has_socat, "{text}");
    for (name, metric) in [
        ("guest to TCP, packets of 64 KiB", "throughput"),
        ("TCP to guest, writes of 64 KiB", "throughput"),
        ("guest to TCP, 64 B and back", "round trip p50"),
    ] {
        assert!(!peer(name, metric, "vhost-device-vsock, socat -b 8192"));
        assert!(peer(
            name,
            metric,
            "zerosock serve, Unix, zerosock --way splice"
        ));
    }
}

#[test]
fn send_and_notify_have_a_row_for_each_variant_or_its_reason() {
    for (arguments, rows) in [
        (&["send", "--case", "UDP, 600 B"], 9),
        // Two back-ends with three metrics each.
        (&["notify", "--case", "UDP, IPv4, limit 32"], 6),
    ] {
        let (table, text) = bench(arguments);
        assert_eq!(table["table"], arguments[0]);
        if is_missing(&table, "zerosock") {
            // Another machine may lack a network namespace with ip(8).
            assert!(text.contains("missing: zerosock"), "{text}");
            let _ = writeln!(
                std::io::stdout(),
                "\nSKIPPED network: bench {}: {}",
                arguments[0],
                table["missing"]
            );
            continue;
        }
        check_rows(&table);
        let found = table["rows"].as_array().unwrap();
        assert_eq!(found.len(), rows, "{text}");
        assert!(found.iter().all(|row| row["missing"].is_null()), "{text}");
    }
}

/// Without iperf3 there are no guests. DPDK takes part if it is installed, AF_XDP if it may be used.
#[test]
fn net_has_rows_of_rings_and_cards_and_names_the_missing() {
    let (table, text) = bench(&["net"]);
    assert_eq!(table["table"], "net");
    if is_missing(&table, "namespace") {
        let missing = &table["missing"];
        let _ = writeln!(std::io::stdout(), "\nSKIPPED network: bench net: {missing}");
        return;
    }
    check_rows(&table);
    assert!(is_missing(&table, "VM"), "{text}");
    assert!(is_missing(&table, "user-mode Linux"), "{text}");
    assert!(
        text.contains("missing: user-mode Linux: IPERF3 names"),
        "{text}"
    );
    let rows = table["rows"].as_array().unwrap();
    let row = |name: &str, metric: &str| {
        let found = rows
            .iter()
            .find(|row| row["name"] == name && row["metric"] == metric);
        found.unwrap_or_else(|| panic!("no {name}, {metric} in {text}"))
    };
    let has_cores = std::thread::available_parallelism().unwrap().get() > 1;
    for way in ["there and back", "port to port"] {
        for size in ["64 B", "1500 B"] {
            let row = row(&format!("rings, {size}, {way}"), "frames");
            assert_eq!(row["ours"].is_number(), has_cores, "{row}");
            assert_eq!(
                row["peer"].is_number(),
                !is_missing(&table, "DPDK"),
                "{row}"
            );
        }
    }
    let has_xdp = !is_missing(&table, "zerosock net --xdp");
    if !has_xdp {
        let missing = &table["missing"];
        let _ = writeln!(std::io::stdout(), "\nSKIPPED AF_XDP: bench net: {missing}");
    }
    for direction in ["transmit", "receive"] {
        for (size, metric) in [
            ("60 B", "CPU"),
            ("1514 B", "CPU"),
            ("1514 B, two cores", "throughput"),
        ] {
            let row = row(&format!("NIC, {direction}, {size}"), metric);
            assert_eq!(row["ours"].is_number(), has_xdp, "{row}");
            assert!(row["peer"].is_number(), "{text}");
        }
    }
}
