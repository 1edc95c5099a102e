//! The table after a kill at any moment, and with contents of any kind.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use proptest::prelude::*;

use super::*;

const GUEST: Cid = Cid::new(3);
const CONNECTIONS: usize = 16;

fn file(connections: usize) -> File {
    let len = table_len(connections) as u64;
    zerosock_sys::memfd::create("flows", len, true)
        .unwrap()
        .into()
}

fn open(file: &File) -> (FlowTable, Vec<(u32, LoggedFlow)>) {
    let len = file.metadata().unwrap().len() as usize;
    FlowTable::open(StateMap::map(file, len).unwrap(), GUEST).unwrap()
}

fn flow(port: u32) -> LoggedFlow {
    LoggedFlow {
        local: Address::new(
            Cid::new(port % 3),
            Port::new(port.wrapping_mul(0x1234_5677)),
        ),
        peer: Address::new(GUEST, Port::new(port)),
        socket_type: match port % 2 {
            0 => SocketType::Stream,
            _ => SocketType::SeqPacket,
        },
    }
}

#[test]
fn a_successor_finds_the_flows_that_were_not_cleared() {
    let file = file(CONNECTIONS);
    let (mut table, stale) = open(&file);
    assert_eq!(stale, []);
    let entries: Vec<u32> = (0..4).map(|port| table.enter(flow(port))).collect();
    table.clear(entries[1]);
    drop(table);
    let (mut table, stale) = open(&file);
    let found: Vec<LoggedFlow> = stale.iter().map(|&(_, flow)| flow).collect();
    assert_eq!(found, [flow(0), flow(2), flow(3)]);
    // New flows take no entry of theirs.
    while !table.is_full() {
        table.enter(flow(100));
    }
    drop(table);
    let (_, all) = open(&file);
    assert_eq!(all.len(), CONNECTIONS);
    assert!(stale.iter().all(|entry| all.contains(entry)));
}

#[test]
fn a_range_without_an_entry_is_refused() {
    for len in [8, 16, 24] {
        let file = zerosock_sys::memfd::create("flows", len, true).unwrap();
        let range = StateMap::map(&file, len as usize).unwrap();
        assert!(FlowTable::open(range, GUEST).is_none(), "{len}");
    }
}

/// A file of pages that no flow was written to takes no memory.
#[test]
fn a_table_takes_the_memory_of_the_flows_that_there_were() {
    use std::os::unix::fs::MetadataExt;
    let file = file(1 << 17);
    let (mut table, _) = open(&file);
    let entries: Vec<u32> = (0..100).map(|port| table.enter(flow(port))).collect();
    for entry in entries {
        table.clear(entry);
    }
    table.enter(flow(7));
    drop(table);
    let (_, stale) = open(&file);
    assert_eq!(stale.len(), 1);
    assert!(file.metadata().unwrap().blocks() * 512 <= 2 * 4096);
}

proptest! {
    #[test]
    fn any_contents_are_a_table(
        words in prop::collection::vec(
            prop_oneof![0..40u64, any::<u64>(), any::<u32>().prop_map(|cid| u64::from(cid) << 32 | 1)],
            HEADER + ENTRY * CONNECTIONS,
        ),
    ) {
        let file = file(CONNECTIONS);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
        let (mut table, stale) = open(&file);
        let mut entries: BTreeSet<u32> = stale.iter().map(|&(entry, _)| entry).collect();
        prop_assert_eq!(entries.len(), stale.len());
        prop_assert!(stale.iter().all(|(_, flow)| flow.peer.cid == GUEST));
        while !table.is_full() {
            prop_assert!(entries.insert(table.enter(flow(9))), "an entry was given twice");
        }
        prop_assert_eq!(entries, (0..CONNECTIONS as u32).collect());
    }
}

/// The file of the child below, and the environment in which the test below is the child.
const CHILD: &str = "ZEROSOCK_TEST_FLOW_TABLE";
/// Ports that the guest of the child uses.
const PORTS: u64 = 16;

/// Opens and closes connections until it is killed. A byte behind the table says for each port whether the guest
/// knows of it.
fn child(path: &str) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    let mut range = StateMap::map(&file, len).unwrap();
    let known = range.split_off(table_len(PORTS as usize)).unwrap();
    let known = known.into_array::<AtomicU64>();
    let (mut table, _) = FlowTable::open(range, GUEST).unwrap();
    let mut entries = [None; PORTS as usize];
    let mut random = u64::from(std::process::id()) << 20 | 1;
    println!("runs");
    loop {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let port = (random % PORTS) as usize;
        match entries[port].take() {
            None => {
                entries[port] = Some(table.enter(flow(port as u32)));
                known[port].store(1, Ordering::Release);
            }
            Some(entry) => {
                known[port].store(0, Ordering::Release);
                table.clear(entry);
            }
        }
    }
}

#[test]
fn a_flow_that_the_guest_knows_is_found_after_a_kill_at_any_moment() {
    if let Ok(path) = std::env::var(CHILD) {
        return child(&path);
    }
    let this = "a_flow_that_the_guest_knows_is_found_after_a_kill_at_any_moment";
    let table = table_len(PORTS as usize);
    for round in 0..100 {
        let len = table as u64 + 8 * PORTS;
        let file = File::from(zerosock_sys::memfd::create("flows", len, true).unwrap());
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([this, "--nocapture"])
            .env(CHILD, path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = child.stdout.take().unwrap();
        let mut text = String::new();
        let mut byte = [0];
        while !text.contains("runs\n") {
            output.read_exact(&mut byte).unwrap();
            text.push(byte[0] as char);
        }
        // Work of another length in each round: the moment is random.
        for _ in 0..round * 100 {
            std::hint::spin_loop();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let mut range = StateMap::map(&file, len as usize).unwrap();
        let known = range.split_off(table).unwrap().into_array::<AtomicU64>();
        let (_, stale) = FlowTable::open(range, GUEST).unwrap();
        let found: Vec<LoggedFlow> = stale.into_iter().map(|(_, flow)| flow).collect();
        for port in (0..PORTS).filter(|&port| known[port as usize].load(Ordering::Acquire) == 1) {
            assert!(
                found.contains(&flow(port as u32)),
                "port {port} in round {round}"
            );
        }
        let all: Vec<LoggedFlow> = (0..PORTS as u32).map(flow).collect();
        assert!(found.iter().all(|flow| all.contains(flow)), "{found:?}");
    }
}
