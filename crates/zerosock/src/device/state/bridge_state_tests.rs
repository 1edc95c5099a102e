//! The full matrix of states and events of the two directions.
//!
//! Every cell below was written by hand; the test compares and never records. A cell is `next`, or
//! `next/action`. A missing or additional cell fails.
//!
//! States of the direction to the host: `con`necting, `open`, `ref`used, `ending`, `ended`. States of the
//! direction to the guest: `open`, `ending` and `ended`, with `+` if the host has closed both directions.
//!
//! Actions: `flush`, `eof` to the host, `stop` the host; `r`, `s`, `b`: shut down the guest's flow for
//! receiving, sending or both.

use std::collections::HashSet;

use super::*;

/// The direction from the guest to the host. Events that are not named change nothing in it.
const TO_HOST: &str = "
        connected finished      delivered   stopped   flow-ended
con     open      con           con         con       con
open    open      ending/flush  open        ref/r     ending
ref     ref       ending/flush  ref         ref       ending
ending  ending    ending        ended/eof   ending/r  ending
ended   ended     ended         ended       ended/r   ended
";

/// The direction from the host to the guest, as above.
const TO_GUEST: &str = "
        guest-stopped  host-finished  host-gone  end-read  flow-ended
open    ended/stop     ending         ending+    ended/s   ended
ending  ended/stop     ending         ending+    ended/s   ended
ending+ ended+/stop    ending+        ending+    ended+/b  ended+
ended   ended          ended          ended+/b   ended     ended
ended+  ended+         ended+         ended+/b   ended+    ended+
";

const EVENTS: [(&str, BridgeEvent); 9] = [
    ("connected", BridgeEvent::Connected),
    ("finished", BridgeEvent::GuestFinished),
    ("guest-stopped", BridgeEvent::GuestStopped),
    ("flow-ended", BridgeEvent::FlowEnded),
    ("delivered", BridgeEvent::Delivered),
    ("stopped", BridgeEvent::HostStopped),
    ("host-finished", BridgeEvent::HostFinished),
    ("host-gone", BridgeEvent::HostGone),
    ("end-read", BridgeEvent::EndRead),
];

const HOST_STATES: [(&str, ToHost); 5] = [
    ("con", ToHost::Connecting),
    ("open", ToHost::Open),
    ("ref", ToHost::Refused),
    ("ending", ToHost::Ending),
    ("ended", ToHost::Ended),
];

const GUEST_STATES: [(&str, ToGuest); 5] = [
    ("open", ToGuest::Open),
    ("ending", ToGuest::Ending { gone: false }),
    ("ending+", ToGuest::Ending { gone: true }),
    ("ended", ToGuest::Ended { gone: false }),
    ("ended+", ToGuest::Ended { gone: true }),
];

fn action(name: &str) -> BridgeAction {
    match name {
        "" => BridgeAction::Nothing,
        "flush" => BridgeAction::Flush,
        "eof" => BridgeAction::EndHost,
        "stop" => BridgeAction::StopHost,
        "r" => BridgeAction::ShutDownFlow(Directions::RECEIVE),
        "s" => BridgeAction::ShutDownFlow(Directions::SEND),
        "b" => BridgeAction::ShutDownFlow(Directions::BOTH),
        other => panic!("no action {other}"),
    }
}

fn named<T: Copy>(all: &[(&str, T)], name: &str) -> T {
    let found = all.iter().find(|(one, _)| *one == name);
    found.unwrap_or_else(|| panic!("nothing is named {name}")).1
}

/// The cells of a matrix: state, event, next state, action.
fn cells(matrix: &'static str) -> Vec<[&'static str; 4]> {
    let mut lines = matrix.lines().filter(|line| !line.is_empty());
    let columns: Vec<&'static str> = lines.next().unwrap().split_whitespace().collect();
    let mut cells = Vec::new();
    for line in lines {
        let mut words = line.split_whitespace();
        let row = words.next().unwrap();
        let words: Vec<&str> = words.collect();
        assert_eq!(words.len(), columns.len(), "row {row}");
        for (column, cell) in columns.iter().zip(words) {
            let (next, action) = cell.split_once('/').unwrap_or((cell, ""));
            cells.push([row, column, next, action]);
        }
    }
    cells
}

#[test]
fn every_state_and_event_is_as_written() {
    let (of_host, of_guest) = (cells(TO_HOST), cells(TO_GUEST));
    for matrix in [&of_host, &of_guest] {
        let distinct: HashSet<_> = matrix
            .iter()
            .map(|[row, column, ..]| (row, column))
            .collect();
        assert_eq!((matrix.len(), distinct.len()), (25, 25));
    }
    let cell = |matrix: &[[&'static str; 4]], state, event| {
        let mut found = matrix
            .iter()
            .filter(|one| (one[0], one[1]) == (state, event));
        found
            .next()
            .map_or((state, ""), |&[.., next, acts]| (next, acts))
    };
    for (host, to_host) in HOST_STATES {
        for (guest, to_guest) in GUEST_STATES {
            for (name, event) in EVENTS {
                let (next_host, host_acts) = cell(&of_host, host, name);
                let (next_guest, guest_acts) = cell(&of_guest, guest, name);
                let next = BridgeState {
                    to_host: named(&HOST_STATES, next_host),
                    to_guest: named(&GUEST_STATES, next_guest),
                };
                let acts = action([host_acts, guest_acts].concat().as_str());
                let got = transition(BridgeState { to_host, to_guest }, event);
                assert_eq!(got, (next, acts), "{host} {guest} {name}");
            }
        }
    }
}
