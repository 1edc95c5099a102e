//! The full state × event matrix.
//!
//! Every cell below was written by hand after the order of checks in Linux's
//! `virtio_transport_recv_pkt`; the test compares and never records. A cell is `effect/rule`; the
//! next state follows from the effect as [`expect`] spells out. A missing or additional cell fails.
//!
//! Rules cited:
//!
//! | | |
//! |---|---|
//! | `2` | no connected or bound socket: RST |
//! | `3` | socket type mismatch: RST; the connection is unaffected |
//! | `5` | peer credit is updated before the state is looked at |
//! | `6l` | LISTEN: op other than REQUEST, or backlog full: RST |
//! | `6c` | connecting: RESPONSE connects, INVALID ignored, RST is ECONNRESET, anything else RST + EPROTO |
//! | `6e` | established: RW, credit, SHUTDOWN, RST act; unknown op dropped without RST |
//! | `6x` | closing: only RST acts |
//! | `6o` | other states: RST |
//! | `r` | never RST in answer to RST |
//! | `s` | SHUTDOWN with both bits and nothing unread: answer RST and close |
//! | `p` | SHUTDOWN flags are permanent and cumulative |
//! | `t` | connect timeout 2 s; close timer 8 s, then RST |
//! | `o` | credit overrun by the peer: RST (ENOBUFS) |
//! | `m` | a message above our buffer, or one empty message too many: RST |
//! | `a` | a port is reusable at once: Linux removes the socket from its table after SHUTDOWN both, so a REQUEST finds none |
//! | `v` | TRANSPORT_RESET: connections are dropped, listeners stay |
//! | `i` | the caller's interface: what `Shard` documents for its commands |
//!
//! States: `L`isten, `N`o connection, `C`onnecting, `I`ncoming, `E`stablished with the directions
//! that we and the peer have shut down (`-`, `r`eceive, `s`end, `b`oth), `X` closing with the
//! directions that the peer has shut down.

use super::*;

/// Packets other than SHUTDOWN.
const PACKETS: &str = "
        req     full    rsp     rst     rw      over    long    flood   crupd   crreq   inval   unkn    type
L       new/6l  cap/6l  no/6l   stray/r no/6l   no/6l   no/6l   no/6l   no/6l   no/6l   no/6l   no/6l   type/3
N       no/2    no/2    no/2    stray/r no/2    no/2    no/2    no/2    no/2    no/2    no/2    no/2    type/3
C       fprot/6c fprot/6c conn/6c frst/6c fprot/6c fprot/6c fprot/6c fprot/6c fprot/6c fprot/6c drop/6c fprot/6c type/3
I       again/a again/a prot/6o prst/r  prot/6o prot/6o prot/6o prot/6o prot/6o prot/6o prot/6o prot/6o type/3
E--     drop/6e drop/6e drop/6e prst/6e data/6e cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
E-r     drop/6e drop/6e drop/6e prst/6e data/6e cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
E-s     drop/6e drop/6e drop/6e prst/6e prot/p  cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
E-b     again/a again/a drop/6e pcls/r  prot/p  cred/o  long/m  flood/m ok/5    ok/5    drop/6e drop/6e type/3
Er-     drop/6e drop/6e drop/6e prst/6e shut/p  cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
Err     drop/6e drop/6e drop/6e prst/6e shut/p  cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
Ers     drop/6e drop/6e drop/6e prst/6e prot/p  cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
Erb     again/a again/a drop/6e pcls/r  prot/p  cred/o  long/m  flood/m ok/5    ok/5    drop/6e drop/6e type/3
Es-     drop/6e drop/6e drop/6e prst/6e data/6e cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
Esr     drop/6e drop/6e drop/6e prst/6e data/6e cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
Ess     drop/6e drop/6e drop/6e prst/6e prot/p  cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
Esb     again/a again/a drop/6e pcls/r  prot/p  cred/o  long/m  flood/m ok/5    ok/5    drop/6e drop/6e type/3
Eb-     drop/6e drop/6e drop/6e prst/6e shut/p  cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
Ebr     drop/6e drop/6e drop/6e prst/6e shut/p  cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
Ebs     drop/6e drop/6e drop/6e prst/6e prot/p  cred/o  long/m  flood/m ok/5    upd/6e  drop/6e drop/6e type/3
Ebb     again/a again/a drop/6e pcls/r  prot/p  cred/o  long/m  flood/m ok/5    ok/5    drop/6e drop/6e type/3
X-      drop/6x drop/6x drop/6x done/6x drop/6x drop/6x drop/6x drop/6x drop/6x drop/6x drop/6x drop/6x type/3
Xr      drop/6x drop/6x drop/6x done/6x drop/6x drop/6x drop/6x drop/6x drop/6x drop/6x drop/6x drop/6x type/3
Xs      drop/6x drop/6x drop/6x done/6x drop/6x drop/6x drop/6x drop/6x drop/6x drop/6x drop/6x drop/6x type/3
";

/// SHUTDOWN with its flags; the last four with bytes unread.
const SHUTDOWNS: &str = "
        sd-     sdr     sds     sdb     ud-     udr     uds     udb
L       no/6l   no/6l   no/6l   no/6l   no/6l   no/6l   no/6l   no/6l
N       no/2    no/2    no/2    no/2    no/2    no/2    no/2    no/2
C       fprot/6c fprot/6c fprot/6c fprot/6c fprot/6c fprot/6c fprot/6c fprot/6c
I       prot/6o prot/6o prot/6o prot/6o prot/6o prot/6o prot/6o prot/6o
E--     ok/p    peer=r/p peer=s/p fin/s ok/p    peer=r/p peer=s/p peer=b/p
E-r     ok/p    ok/p    fin/s   fin/s   ok/p    ok/p    peer=b/p peer=b/p
E-s     ok/p    fin/s   ok/p    fin/s   ok/p    peer=b/p ok/p   peer=b/p
E-b     fin/s   fin/s   fin/s   fin/s   ok/p    ok/p    ok/p    ok/p
Er-     ok/p    peer=r/p peer=s/p fin/s ok/p    peer=r/p peer=s/p peer=b/p
Err     ok/p    ok/p    fin/s   fin/s   ok/p    ok/p    peer=b/p peer=b/p
Ers     ok/p    fin/s   ok/p    fin/s   ok/p    peer=b/p ok/p   peer=b/p
Erb     fin/s   fin/s   fin/s   fin/s   ok/p    ok/p    ok/p    ok/p
Es-     ok/p    peer=r/p peer=s/p fin/s ok/p    peer=r/p peer=s/p peer=b/p
Esr     ok/p    ok/p    fin/s   fin/s   ok/p    ok/p    peer=b/p peer=b/p
Ess     ok/p    fin/s   ok/p    fin/s   ok/p    peer=b/p ok/p   peer=b/p
Esb     fin/s   fin/s   fin/s   fin/s   ok/p    ok/p    ok/p    ok/p
Eb-     ok/p    peer=r/p peer=s/p fin/s ok/p    peer=r/p peer=s/p fin/s
Ebr     ok/p    ok/p    fin/s   fin/s   ok/p    ok/p    fin/s   fin/s
Ebs     ok/p    fin/s   ok/p    fin/s   ok/p    fin/s   ok/p    fin/s
Ebb     fin/s   fin/s   fin/s   fin/s   fin/s   fin/s   fin/s   fin/s
X-      clo=-/p clo=r/p clo=s/p both/s  clo=-/p clo=r/p clo=s/p both/s
Xr      clo=r/p clo=r/p both/s  both/s  clo=r/p clo=r/p both/s  both/s
Xs      clo=s/p both/s  clo=s/p both/s  clo=s/p both/s  clo=s/p both/s
";

/// Commands of the caller, and internal events.
const COMMANDS: &str = "
        connect accept  reject  cl-     clr     cls     clb     reset   sent    drained timeout trans
L       bad/i   bad/i   bad/i   bad/i   bad/i   bad/i   bad/i   bad/i   ok/i    ok/i    ok/i    ok/v
N       call/i  bad/i   bad/i   bad/i   bad/i   bad/i   bad/i   bad/i   ok/i    ok/i    ok/i    ok/v
C       bad/i   bad/i   bad/i   bad/i   bad/i   bad/i   bad/i   floc/i  ok/i    ok/i    ftime/t ftr/v
I       bad/i   answ/i  rej/i   bad/i   bad/i   bad/i   bad/i   loc/i   ok/i    ok/i    ok/i    tr/v
E--     bad/i   bad/i   bad/i   ok/p    me=r/p  me=s/p  me=b/p  loc/i   ok/i    ok/i    ok/i    tr/v
E-r     bad/i   bad/i   bad/i   ok/p    me=r/p  me=s/p  me=b/p  loc/i   ok/i    ok/i    ok/i    tr/v
E-s     bad/i   bad/i   bad/i   ok/p    me=r/p  me=s/p  me=b/p  loc/i   ok/i    ok/i    ok/i    tr/v
E-b     bad/i   bad/i   bad/i   ok/p    me=r/p  me=s/p  fin/s   loc/i   ok/i    fin/s   ok/i    tr/v
Er-     bad/i   bad/i   bad/i   ok/p    ok/p    me=b/p  me=b/p  loc/i   ok/i    ok/i    ok/i    tr/v
Err     bad/i   bad/i   bad/i   ok/p    ok/p    me=b/p  me=b/p  loc/i   ok/i    ok/i    ok/i    tr/v
Ers     bad/i   bad/i   bad/i   ok/p    ok/p    me=b/p  me=b/p  loc/i   ok/i    ok/i    ok/i    tr/v
Erb     bad/i   bad/i   bad/i   ok/p    ok/p    fin/s   fin/s   loc/i   ok/i    fin/s   ok/i    tr/v
Es-     bad/i   bad/i   bad/i   ok/p    me=b/p  ok/p    me=b/p  loc/i   ok/i    ok/i    ok/i    tr/v
Esr     bad/i   bad/i   bad/i   ok/p    me=b/p  ok/p    me=b/p  loc/i   ok/i    ok/i    ok/i    tr/v
Ess     bad/i   bad/i   bad/i   ok/p    me=b/p  ok/p    me=b/p  loc/i   ok/i    ok/i    ok/i    tr/v
Esb     bad/i   bad/i   bad/i   ok/p    fin/s   ok/p    fin/s   loc/i   ok/i    fin/s   ok/i    tr/v
Eb-     bad/i   bad/i   bad/i   ok/p    ok/p    ok/p    ok/p    loc/i   clo=-/p ok/i    time/t  tr/v
Ebr     bad/i   bad/i   bad/i   ok/p    ok/p    ok/p    ok/p    loc/i   clo=r/p ok/i    time/t  tr/v
Ebs     bad/i   bad/i   bad/i   ok/p    ok/p    ok/p    ok/p    loc/i   clo=s/p ok/i    time/t  tr/v
Ebb     bad/i   bad/i   bad/i   fin/s   fin/s   fin/s   fin/s   loc/i   clo=b/p fin/s   time/t  tr/v
X-      bad/i   bad/i   bad/i   ok/p    ok/p    ok/p    ok/p    loc/i   ok/i    ok/i    time/t  tr/v
Xr      bad/i   bad/i   bad/i   ok/p    ok/p    ok/p    ok/p    loc/i   ok/i    ok/i    time/t  tr/v
Xs      bad/i   bad/i   bad/i   ok/p    ok/p    ok/p    ok/p    loc/i   ok/i    ok/i    time/t  tr/v
";

const RULES: [&str; 17] = [
    "2", "3", "5", "6l", "6c", "6e", "6x", "6o", "r", "s", "p", "t", "o", "m", "a", "v", "i",
];

fn how(letter: char) -> Directions {
    match letter {
        '-' => Directions::NONE,
        'r' => Directions::RECEIVE,
        's' => Directions::SEND,
        'b' => Directions::BOTH,
        other => panic!("no direction {other}"),
    }
}

fn state(name: &str) -> State {
    let letters: Vec<char> = name.chars().collect();
    match letters[..] {
        ['L'] => State::Listen,
        ['N'] => State::Closed,
        ['C'] => State::Connecting,
        ['I'] => State::Incoming,
        ['E', local, peer] => State::Established {
            local: how(local),
            peer: how(peer),
        },
        ['X', peer] => State::Closing { peer: how(peer) },
        _ => panic!("no state {name}"),
    }
}

fn input(name: &str) -> Input {
    let last = || how(name.chars().last().unwrap());
    match name {
        "req" => Input::Request,
        "full" => Input::RequestOverCap,
        "rsp" => Input::Response,
        "rst" => Input::Rst,
        "rw" => Input::Rw,
        "over" => Input::RwOverCredit,
        "long" => Input::RwTooLong,
        "flood" => Input::RwFlood,
        "crupd" => Input::CreditUpdate,
        "crreq" => Input::CreditRequest,
        "inval" => Input::Invalid,
        "unkn" => Input::Unknown,
        "type" => Input::TypeMismatch,
        "sd-" | "sdr" | "sds" | "sdb" => Input::Shutdown {
            how: last(),
            unread: false,
        },
        "ud-" | "udr" | "uds" | "udb" => Input::Shutdown {
            how: last(),
            unread: true,
        },
        "connect" => Input::Connect,
        "accept" => Input::Accept,
        "reject" => Input::Reject,
        "cl-" | "clr" | "cls" | "clb" => Input::Close(last()),
        "reset" => Input::Reset,
        "sent" => Input::ShutdownSent,
        "drained" => Input::Drained,
        "timeout" => Input::TimedOut,
        "trans" => Input::TransportReset,
        other => panic!("no input {other}"),
    }
}

/// The next state and action that an effect's name stands for, in `state`.
fn expect(state: State, effect: &str) -> (State, Action) {
    use CloseReason as Close;
    use RefuseReason as Refuse;

    let closed = |rst, reason| (State::Closed, Action::End { rst, reason });
    let refused = |rst, reason| (State::Closed, Action::Refuse { rst, reason });
    let reset = |reason| (state, Action::ResetPacket(reason));
    if let Some((what, letter)) = effect.split_once('=') {
        let shut = how(letter.chars().next().unwrap());
        return match (what, state) {
            // The caller is informed of the peer's shutdown.
            ("peer", State::Established { local, .. }) => (
                State::Established { local, peer: shut },
                Action::PeerShutdown,
            ),
            // The peer is informed of ours.
            ("me", State::Established { peer, .. }) => (
                State::Established { local: shut, peer },
                Action::SendShutdown,
            ),
            // The SHUTDOWN of both directions was sent.
            ("clo", _) => (State::Closing { peer: shut }, Action::Handled),
            _ => panic!("no effect {effect} in {state:?}"),
        };
    }
    match effect {
        "ok" => (state, Action::Handled),
        "bad" => (state, Action::WrongState),
        "drop" => (state, Action::Ignore(DropReason::Unexpected)),
        "stray" => (state, Action::Ignore(DropReason::StrayReset)),
        "no" => reset(DropReason::NoSocket),
        "cap" => reset(DropReason::OverCap),
        "type" => reset(DropReason::TypeMismatch),
        "new" => (State::Incoming, Action::Incoming),
        "again" => (State::Closed, Action::Supersede),
        "call" => (State::Connecting, Action::SendRequest),
        "answ" => (State::ESTABLISHED, Action::SendResponse),
        "conn" => (State::ESTABLISHED, Action::Connected),
        "data" => (state, Action::Deliver),
        "shut" => (state, Action::Discard),
        "upd" => (state, Action::CreditUpdate),
        "fprot" => refused(true, Refuse::ProtocolError),
        "frst" => refused(false, Refuse::Reset),
        "floc" => refused(true, Refuse::LocalReset),
        "ftime" => refused(true, Refuse::TimedOut),
        "ftr" => refused(false, Refuse::TransportReset),
        "prot" => closed(true, Close::ProtocolError),
        "cred" => closed(true, Close::CreditExceeded),
        "long" => closed(true, Close::MessageTooLong),
        "flood" => closed(true, Close::MessageFlood),
        "prst" => closed(false, Close::PeerReset),
        "pcls" => closed(false, Close::PeerClosed),
        "fin" => closed(true, Close::PeerClosed),
        "done" => closed(false, Close::Finished),
        "both" => closed(true, Close::Finished),
        "time" => closed(true, Close::TimedOut),
        "loc" => closed(true, Close::LocalReset),
        "rej" => closed(true, Close::Rejected),
        "tr" => closed(false, Close::TransportReset),
        other => panic!("no effect {other}"),
    }
}

/// Every state by name.
fn states() -> Vec<String> {
    let mut names: Vec<String> = ["L", "N", "C", "I"].map(String::from).into();
    for local in "-rsb".chars() {
        names.extend("-rsb".chars().map(|peer| format!("E{local}{peer}")));
    }
    // Closing ends when the peer, too, has shut down both directions.
    names.extend("-rs".chars().map(|peer| format!("X{peer}")));
    names
}

#[test]
fn every_cell_follows_the_reset_rules() {
    let mut seen = std::collections::HashSet::new();
    let mut wrong = Vec::new();
    for grid in [PACKETS, SHUTDOWNS, COMMANDS] {
        let mut lines = grid.lines().filter(|line| !line.is_empty());
        let columns: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
        let mut rows = Vec::new();
        for line in lines {
            let mut cells = line.split_whitespace();
            let row = cells.next().unwrap();
            let cells: Vec<&str> = cells.collect();
            assert_eq!(cells.len(), columns.len(), "cells in row {row}");
            for (column, cell) in columns.iter().zip(cells) {
                let (effect, rule) = cell.split_once('/').expect("effect/rule");
                assert!(RULES.contains(&rule), "no rule {rule}");
                let (from, input) = (state(row), input(column));
                assert!(seen.insert((from, input)), "cell {row} {column} twice");
                let (want, got) = (expect(from, effect), transition(from, input));
                if want != got {
                    wrong.push(format!(
                        "{row} {column}: rules say {want:?}, table says {got:?}"
                    ));
                }
            }
            rows.push(row.to_owned());
        }
        assert_eq!(rows, states());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(seen.len(), states().len() * 33, "33 inputs to each state");
}

/// Never an RST in answer to an RST, whatever the state.
#[test]
fn rst_is_never_answered() {
    for name in states() {
        let (_, action) = transition(state(&name), Input::Rst);
        assert!(
            matches!(
                action,
                Action::Ignore(_)
                    | Action::End { rst: false, .. }
                    | Action::Refuse { rst: false, .. }
            ),
            "{name}: {action:?}"
        );
    }
}
