//! Every kind of end with every other, in every way: contents, half-close and abrupt close. Where one is a
//! Unix socket, way auto runs once more as on a kernel that cannot refuse descriptors.
//!
//! One process of `zerosock relay` for each combination and way, and for each connection if neither end
//! listens. Run with --nocapture to see the table. The ends `vsock` and `vsock-listen` are tested in guests,
//! but not with `hybrid`.

mod ends;
mod messages;
mod streams;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::sync::Mutex;
use std::thread;

use self::ends::{End, KINDS, Kind, World};
use crate::process::{Ended, Running, wait_until};
use crate::{receives_descriptors, relay, skip_receiving};

const WAYS: [&str; 4] = ["auto", "splice", "copy", "sockmap"];

/// The test, in what it says.
const NAME: &str = "every_end_with_every_other_in_every_way";

/// What a combination of ends does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outcome {
    Streams,
    Messages,
    /// The command line is refused with a text that has this part.
    Refused(&'static str),
}

/// docs/relay.md, "What goes with what".
fn outcome(one: Kind, other: Kind) -> Outcome {
    let both = |holds: fn(Kind) -> bool| holds(one) && holds(other);
    let either = |holds: fn(Kind) -> bool| holds(one) || holds(other);
    if both(Kind::is_attached) {
        return Outcome::Refused("one of the ends has to be a socket of the kernel");
    }
    if either(Kind::is_attached) {
        return match () {
            () if either(Kind::keeps_messages) => Outcome::Refused("is a stream: give a stream"),
            () if both(Kind::listens) => Outcome::Refused("both listen: one of the ends has to"),
            () if either(|kind| kind == Kind::Hybrid) => {
                Outcome::Refused("cannot be joined to an attached endpoint")
            }
            () => Outcome::Streams,
        };
    }
    if !both(Kind::keeps_messages) {
        return match either(Kind::keeps_messages) {
            true => Outcome::Refused("has messages and"),
            false => Outcome::Streams,
        };
    }
    if both(Kind::listens) && either(Kind::is_datagram) {
        return Outcome::Refused("both listen: with datagrams one");
    }
    if both(Kind::is_datagram) && !either(Kind::listens) {
        return Outcome::Refused("no peer could send the first datagram");
    }
    Outcome::Messages
}

/// How the access log names the way, and what the relay says if it takes another one than was asked for.
fn taken(kinds: [Kind; 2], way: &str, can_redirect: bool) -> (String, Option<&'static str>) {
    if kinds.iter().any(|kind| kind.is_attached()) {
        let refusal = (way != "auto").then_some("an end is attached: bytes move in place");
        return ("in place".into(), refusal);
    }
    let streams = !kinds[0].keeps_messages();
    let refusal = match way {
        "splice" if !streams => Some("both ends have to be TCP or Unix streams: auto is used"),
        "sockmap" => match kinds {
            _ if kinds.iter().all(|kind| kind.is_udp()) => None,
            _ if kinds.iter().any(|kind| kind.is_tcp()) => Some("TCP can be no source"),
            _ => Some("both ends have to be UDP, or vsock and TCP: auto is used"),
        },
        _ => None,
    };
    if way == "sockmap" && refusal.is_none() && can_redirect {
        return ("sockmap".into(), None);
    }
    // The listening end is the source, the first one if that is true of both or neither.
    let swapped = kinds[1].listens() && !kinds[0].listens();
    let [source, target] = match swapped {
        true => [kinds[1], kinds[0]],
        false => kinds,
    };
    let into = |kind: Kind| match way {
        "splice" | "copy" => way.to_owned(),
        _ if kind.is_tcp() => "copy".into(),
        _ => "splice".into(),
    };
    let way = match (streams, into(target), into(source)) {
        (false, ..) => "messages".into(),
        (true, there, back) if there == back => there,
        (true, there, back) => format!("{there}/{back}"),
    };
    (way, refusal)
}

/// A relay between two ends.
struct Rig<'a> {
    world: &'a World,
    ends: [End; 2],
    way: &'static str,
    can_redirect: bool,
    /// As on a kernel that cannot refuse descriptors: each read from a Unix socket has room for them.
    receives_descriptors: bool,
    running: Option<Running>,
    /// What the processes have said that have ended.
    said: String,
}

impl<'a> Rig<'a> {
    fn new(world: &'a World, kinds: [Kind; 2], way: &'static str, can_redirect: bool) -> Rig<'a> {
        Rig {
            world,
            ends: kinds.map(|kind| world.end(kind)),
            way,
            can_redirect,
            receives_descriptors: false,
            running: None,
            said: String::new(),
        }
    }

    fn kinds(&self) -> [Kind; 2] {
        [self.ends[0].kind, self.ends[1].kind]
    }

    fn about(&self) -> String {
        let [one, other] = &self.ends;
        let said = match &self.running {
            Some(running) => running.stderr(),
            None => self.said.clone(),
        };
        let receiving = match self.receives_descriptors {
            true => ", receiving descriptors",
            false => "",
        };
        format!(
            "{} {} --way {}{receiving}: {said}",
            one.text, other.text, self.way
        )
    }

    fn is_single(&self) -> bool {
        !self.ends.iter().any(|end| end.kind.listens())
    }

    /// Starts the relay if it does not run, or if it relays one pair only.
    fn start(&mut self) {
        if self.is_single() {
            self.stop();
        }
        if self.running.is_some() {
            return;
        }
        let [one, other] = &self.ends;
        let words = [&one.text, &other.text, "--way", self.way, "--workers", "2"];
        let mut command = relay(&words);
        if self.receives_descriptors {
            assert!(receives_descriptors(&mut command));
        }
        let running = Running::start(&mut command);
        wait_until("the relay", || running.stderr().contains("relaying"));
        let said = running.stderr();
        let mut listening = said.lines().filter(|line| line.contains("listening end="));
        for end in self.ends.iter_mut().filter(|end| end.kind.listens()) {
            end.learn(listening.next().expect("one line for each listener"));
        }
        self.running = Some(running);
    }

    /// Ends the relay, which ends by itself if it relays one pair only.
    fn stop(&mut self) {
        let Some(running) = self.running.take() else {
            return;
        };
        if !self.is_single() {
            running.signal("TERM");
        }
        let Ended { code, stderr, .. } = running.finish();
        self.said += &stderr;
        assert!(code == Some(0) || self.is_single(), "{}", self.about());
    }

    /// Stops the relay and looks at its log.
    fn check_log(&mut self) {
        self.stop();
        let (way, refusal) = taken(self.kinds(), self.way, self.can_redirect);
        let said = self.said.replace('"', "");
        let ends: Vec<_> = said
            .lines()
            .filter(|line| line.contains(" ended "))
            .collect();
        assert!(!ends.is_empty(), "{}", self.about());
        let named = ends
            .iter()
            .filter(|line| line.contains(&format!("way={way}")));
        assert_eq!(named.count(), ends.len(), "{way}: {}", self.about());
        if let Some(refusal) = refusal {
            let refusal = format!("--way {}: {refusal}", self.way);
            let times = said.matches(&refusal).count();
            let is_said = times == 1 || times > 1 && self.is_single();
            assert!(is_said, "{refusal}: {}", self.about());
        }
    }
}

/// Whether --way sockmap works here; says why not.
fn can_redirect() -> bool {
    let words = [
        "udp-listen:127.0.0.1:0",
        "udp:127.0.0.1:1",
        "--way",
        "sockmap",
    ];
    let running = Running::start(&mut relay(&words));
    wait_until("the relay", || running.stderr().contains("relaying"));
    let said = running.stderr();
    let reason = said.lines().find(|line| line.contains("auto is used"));
    if let Some(reason) = reason {
        skip("sockmap", reason);
    }
    reason.is_none()
}

fn skip(part: &str, reason: &str) {
    // Standard output is not shown if the test passes.
    let _ = writeln!(io::stderr(), "\nSKIPPED {part}: {NAME}: {reason}");
}

fn refuse(rig: &Rig<'_>, part: &str) {
    let [one, other] = &rig.ends;
    let ended = Running::start(&mut relay(&[&one.text, &other.text])).finish();
    assert_eq!(ended.code, Some(2), "{}: {}", rig.about(), ended.stderr);
    assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
}

/// Runs a combination, and returns what the table says of it.
fn run(
    world: &World,
    kinds: [Kind; 2],
    can_redirect: bool,
    can_receive_descriptors: bool,
) -> String {
    let what = outcome(kinds[0], kinds[1]);
    if let Outcome::Refused(part) = what {
        refuse(&Rig::new(world, kinds, "auto", false), part);
        return "-".into();
    }
    let join = |way, receives_descriptors| {
        let mut rig = Rig::new(world, kinds, way, can_redirect);
        rig.receives_descriptors = receives_descriptors;
        match what {
            Outcome::Messages => messages::run(&mut rig),
            _ => streams::run(&mut rig),
        }
        rig.check_log();
        taken(kinds, way, can_redirect).0
    };
    let mut ways = WAYS.map(|way| join(way, false)).to_vec();
    ways.dedup();
    let mut text = ways.join(", ");
    if kinds.iter().any(|kind| kind.is_unix()) && can_receive_descriptors {
        join("auto", true);
        text += "; receiving descriptors";
    }
    if (0..2).any(|end| messages::is_of_association(kinds, end)) {
        text += "; the next datagram after a close of the target begins a new connection";
    }
    text
}

#[test]
fn every_end_with_every_other_in_every_way() {
    let world = World::new();
    let can_redirect = can_redirect();
    let can_receive_descriptors = receives_descriptors(&mut relay(&[]));
    if !can_receive_descriptors {
        skip_receiving(NAME);
    }
    let mut work = Vec::new();
    for (row, &one) in KINDS.iter().enumerate() {
        for (column, &other) in KINDS.iter().enumerate().skip(row) {
            // The order of the ends does not matter: both are used.
            let swapped = (row + column) % 2 == 1;
            let kinds = if swapped { [other, one] } else { [one, other] };
            work.push(((row, column), kinds));
        }
    }
    let (work, results) = (Mutex::new(work.into_iter()), Mutex::new(BTreeMap::new()));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let next = work.lock().unwrap().next();
                    let Some((place, kinds)) = next else { return };
                    let ways = run(&world, kinds, can_redirect, can_receive_descriptors);
                    results.lock().unwrap().insert(place, (kinds, ways));
                }
            });
        }
    });
    let mut table = String::new();
    for (kinds, ways) in results.into_inner().unwrap().into_values() {
        let [one, other] = kinds.map(Kind::name);
        writeln!(table, "{one:22} {other:22} {ways}").unwrap();
    }
    println!(
        "{table}vsock, vsock-listen    with tcp, unix, vsock and their -listen: in a guest; not with hybrid"
    );
}
