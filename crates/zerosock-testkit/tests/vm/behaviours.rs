//! The list of behaviours with guests: as client and as server of a process at a daemon, of each
//! other, and of a program that embeds the device, which is the host to them.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use zerosock::vsock::Endpoint;
use zerosock_testkit::protocol::Command;

use crate::InLab;
use crate::behaviour::library::Library;
use crate::behaviour::table::shown_by_guest;
use crate::behaviour::{ALL, Behaviour, Pair, Side, Skip, Started, Verdict, With};
use crate::lab::{Lab, QUEUE_PAIRS, STEP, Skipped, Vm};

/// The sockets of a guest's kernel as a side.
struct Guest<'a> {
    vm: &'a Vm,
    kernel: (u32, u32),
}

impl Side for Guest<'_> {
    fn cid(&self) -> u32 {
        self.vm.endpoint.cid
    }

    fn start(&self, command: Command) -> Started {
        Started::Guest(self.vm.start(command))
    }

    fn kernel(&self) -> Option<(u32, u32)> {
        Some(self.kernel)
    }
}

/// Tests a behaviour in a lab. The process, or the program that embeds the device, has so many queue pairs.
type Setting = fn(&Lab, &Behaviour, u16) -> Verdict;

/// Name of a setting, whether client and server are guests, and its constructor.
const SETTINGS: &[(&str, [bool; 2], Setting)] = &[
    ("guest_to_process", [true, false], |lab, one, pairs| {
        one.show(&Pair {
            client: &guest(lab, &lab.a),
            server: &process(lab, pairs),
        })
    }),
    ("process_to_guest", [false, true], |lab, one, pairs| {
        one.show(&Pair {
            client: &process(lab, pairs),
            server: &guest(lab, &lab.a),
        })
    }),
    ("guest_to_guest", [true, true], |lab, one, _| {
        one.show(&Pair {
            client: &guest(lab, &lab.a),
            server: &guest(lab, &lab.b),
        })
    }),
    ("guest_to_host", [true, false], |lab, one, pairs| {
        let embedded = lab.embedded(pairs);
        one.show(&Pair {
            client: &guest(lab, &embedded.guest),
            server: &embedded.host,
        })
    }),
    ("host_to_guest", [false, true], |lab, one, pairs| {
        let embedded = lab.embedded(pairs);
        one.show(&Pair {
            client: &embedded.host,
            server: &guest(lab, &embedded.guest),
        })
    }),
];

/// Behaviours of clients that need a fix of Linux 6.1.190: a connect after a failed one does not get the earlier
/// error. Debian's package of user-mode Linux has an older kernel.
const NEED_6_1_190: &[&str] = &[
    "retry_after_a_failed_connect",
    "connections_of_another_kind_are_refused",
];

fn needs_6_1_190(behaviour: &Behaviour, [client, _]: [bool; 2]) -> bool {
    client && NEED_6_1_190.contains(&behaviour.name)
}

/// All behaviours in all settings, with one queue pair.
pub(crate) fn all() -> impl Iterator<Item = (String, InLab)> {
    in_settings("", 1, |_, _| true)
}

/// Those of [`all`] that user-mode Linux 6.1 can show, or the others.
pub(crate) fn by_user_mode(can: bool) -> impl Iterator<Item = (String, InLab)> {
    in_settings("", 1, move |one, guests| needs_6_1_190(one, guests) != can)
}

/// The settings with one guest, once more with several queue pairs at the other end. A stock guest has one, so
/// one kernel is enough for each behaviour: user-mode Linux 6.1 for those that it shows, `by_user_mode`, and
/// another one for the others.
pub(crate) fn with_queue_pairs(by_user_mode: bool) -> impl Iterator<Item = (String, InLab)> {
    let wanted = move |one: &Behaviour, guests: [bool; 2]| {
        let role = match guests {
            [true, false] => "client",
            [false, true] => "server",
            _ => return false,
        };
        let can = shown_by_guest(one.name, "6.1", role) && !needs_6_1_190(one, guests);
        can == by_user_mode
    };
    in_settings("_with_three_queue_pairs", QUEUE_PAIRS, wanted)
}

fn in_settings(
    suffix: &'static str,
    pairs: u16,
    wanted: impl Fn(&Behaviour, [bool; 2]) -> bool + Copy + 'static,
) -> impl Iterator<Item = (String, InLab)> {
    SETTINGS.iter().flat_map(move |(setting, guests, show)| {
        let [client, server] = *guests;
        let possible = move |behaviour: &&Behaviour| match behaviour.with {
            _ if !wanted(behaviour, *guests) => false,
            With::Any => true,
            With::KernelClient => client,
            With::KernelServer => server,
        };
        ALL.iter().filter(possible).map(move |behaviour| {
            let run = move |lab: &Lab| {
                show(lab, behaviour, pairs).map_err(|Skip(reason)| Skipped(reason))
            };
            let run: InLab = Arc::new(run);
            (format!("{setting}{suffix}::{}", behaviour.name), run)
        })
    })
}

fn guest<'a>(lab: &Lab, vm: &'a Vm) -> Guest<'a> {
    let mut numbers = lab.release.split('.').map(str::parse);
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or(0);
    let kernel = (next(), next());
    Guest { vm, kernel }
}

/// A process attached at a guest's place at the device. The earlier occupant may still be
/// disconnecting.
fn process(lab: &Lab, pairs: u16) -> Library {
    let give_up = Instant::now() + STEP;
    loop {
        let builder = Endpoint::builder().queue_pairs(pairs);
        match builder.attach_device(&lab.process.vhost) {
            Ok(endpoint) => return Library::new(endpoint),
            Err(error) => assert!(Instant::now() < give_up, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}
