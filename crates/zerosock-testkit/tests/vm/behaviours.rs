//! The list of behaviours with guests: as client and as server of a process at a daemon, of each
//! other, and of a program that embeds the device, which is the host to them.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use zerosock::vsock::Endpoint;
use zerosock_testkit::protocol::Command;

use crate::InLab;
use crate::behaviour::library::Library;
use crate::behaviour::{ALL, Behaviour, Pair, Side, Skip, Started, Verdict, With, pairs};
use crate::lab::{Lab, STEP, Skipped, Vm};

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

/// Tests a behaviour in a lab.
type Setting = fn(&Lab, &Behaviour) -> Verdict;

/// Name of a setting, whether client and server are guests, and its constructor.
const SETTINGS: &[(&str, [bool; 2], Setting)] = &[
    ("guest_to_process", [true, false], |lab, one| {
        one.show(&Pair {
            client: &guest(lab, &lab.a),
            server: &process(lab),
        })
    }),
    ("process_to_guest", [false, true], |lab, one| {
        one.show(&Pair {
            client: &process(lab),
            server: &guest(lab, &lab.a),
        })
    }),
    ("guest_to_guest", [true, true], |lab, one| {
        one.show(&Pair {
            client: &guest(lab, &lab.a),
            server: &guest(lab, &lab.b),
        })
    }),
    ("guest_to_host", [true, false], |lab, one| {
        let embedded = lab.embedded();
        one.show(&Pair {
            client: &guest(lab, &embedded.guest),
            server: &embedded.host,
        })
    }),
    ("host_to_guest", [false, true], |lab, one| {
        let embedded = lab.embedded();
        one.show(&Pair {
            client: &embedded.host,
            server: &guest(lab, &embedded.guest),
        })
    }),
];

/// All behaviours in all settings.
pub(crate) fn all() -> impl Iterator<Item = (String, InLab)> {
    SETTINGS.iter().flat_map(|(setting, guests, show)| {
        let [client, server] = *guests;
        let possible = move |behaviour: &&Behaviour| match behaviour.with {
            With::Any => true,
            With::KernelClient => client,
            With::KernelServer => server,
        };
        ALL.iter().filter(possible).map(move |behaviour| {
            let run = |lab: &Lab| show(lab, behaviour).map_err(|Skip(reason)| Skipped(reason));
            let run: InLab = Arc::new(run);
            (format!("{setting}::{}", behaviour.name), run)
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
fn process(lab: &Lab) -> Library {
    let give_up = Instant::now() + STEP;
    loop {
        let builder = Endpoint::builder().queue_pairs(pairs());
        match builder.attach_device(&lab.process.vhost) {
            Ok(endpoint) => return Library::new(endpoint),
            Err(error) => assert!(Instant::now() < give_up, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}
