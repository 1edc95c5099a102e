//! Entry points of fuzz targets (docs/fuzzing.md) to what is private otherwise.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;

use zerosock_proto::Cid;
use zerosock_proto::vsock::FlowLog;
use zerosock_ring::StateMap;

use crate::control::attach::codec as attach;
use crate::control::guest::wire;
use crate::device::state::flow_table::{FlowTable, table_len};
use crate::registration::key::{GuestKey, Nonce, StreamTags};

pub use crate::device::fuzz::{Drive, vsock_worker};
pub use crate::device::host_sockets::hybrid::fuzz::connect_line;

/// Connections of the table that [`flow_table`] opens.
pub const CONNECTIONS: usize = 16;
/// Bytes of that table.
pub const TABLE: usize = table_len(CONNECTIONS);

/// Messages of the attach protocol. What is accepted is encoded such that the same is decoded.
pub fn attach(bytes: &[u8]) {
    match attach::decode_request(bytes) {
        Ok(request) => {
            let again = attach::encode_request(&request).expect("it was decoded");
            assert!(again.len() <= attach::MAX_REQUEST);
            assert_eq!(attach::decode_request(&again), Ok(request));
        }
        Err(answer) => {
            let again = attach::encode_answer(&answer);
            assert_eq!(attach::decode_answer(&again), Ok(answer));
        }
    }
    if let Ok(answer) = attach::decode_answer(bytes) {
        assert_eq!(
            attach::decode_answer(&attach::encode_answer(&answer)),
            Ok(answer)
        );
    }
}

/// A stream of an agent: requests with valid tags and any header and body, which arrive in parts, and a last one with
/// a wrong tag.
pub fn guest_requests(requests: &[(u16, u32, &[u8])], part: usize) {
    let (key, nonce) = (GuestKey::none(), Nonce([7; 32]));
    let mut tags = StreamTags::new(&key, &nonce);
    let mut readers = [(); 2].map(|()| wire::RequestReader::new(&key, &nonce));
    let mut writer = wire::RequestWriter::new(&key, &nonce);
    for (operation, len, body) in requests {
        let mut bytes = wire::MAGIC.to_vec();
        bytes.extend([1, 0, 0, 0]);
        bytes.extend(operation.to_le_bytes());
        bytes.extend([0, 0]);
        bytes.extend(len.to_le_bytes());
        bytes.extend(*body);
        let tag = tags.next(&bytes);
        bytes.extend(tag);
        let known = bytes.get(..part.min(bytes.len() - 1)).unwrap_or_default();
        let early = readers[0].decode(known);
        let whole = readers[0].decode(&bytes);
        match (early, &whole) {
            (Ok(None), _) => {}
            (Ok(Some(_)), _) => panic!("decoded before all of it has arrived"),
            (Err(error), whole) => assert_eq!(whole.as_ref().err(), Some(&error)),
        }
        let Ok(Some((request, taken))) = whole else {
            return;
        };
        assert_eq!(taken, bytes.len(), "the tag covers all of it");
        assert!(taken <= wire::MAX_REQUEST);
        let again = writer.encode(&request).expect("it was decoded");
        assert_eq!(readers[1].decode(&again), Ok(Some((request, again.len()))));
    }
}

/// Answers of a daemon, as an agent reads them.
pub fn guest_answers(mut bytes: &[u8]) {
    while let Ok(Some((answer, taken))) = wire::decode_answer(bytes) {
        assert!((1..=wire::MAX_ANSWER).contains(&taken));
        let again = wire::encode_answer(&answer);
        assert_eq!(wire::decode_answer(&again), Ok(Some((answer, again.len()))));
        bytes = &bytes[taken..];
    }
}

/// The flow log that a former process has left in the first [`TABLE`] bytes of this file: each entry is stale or
/// free, and no entry is given twice.
pub fn flow_table(file: BorrowedFd<'_>) {
    let guest = Cid::new(3);
    let open = || {
        let range = StateMap::map(file, TABLE).expect("the file is sealed");
        FlowTable::open(range, guest).expect("there is room")
    };
    let (mut table, stale) = open();
    let mut entries: BTreeSet<u32> = stale.iter().map(|&(entry, _)| entry).collect();
    assert_eq!(entries.len(), stale.len());
    assert!(stale.iter().all(|(_, flow)| flow.peer.cid == guest));
    for &(entry, _) in stale.iter().step_by(2) {
        table.clear(entry);
        entries.remove(&entry);
    }
    while let (false, Some(&(_, flow))) = (table.is_full(), stale.first()) {
        assert!(
            entries.insert(table.enter(flow)),
            "an entry was given twice"
        );
    }
    let all = if stale.is_empty() {
        0
    } else {
        CONNECTIONS as u32
    };
    assert_eq!(entries, (0..all).collect());
    drop(table);
    assert_eq!(
        open().1.len(),
        all as usize,
        "a successor finds other connections"
    );
}
