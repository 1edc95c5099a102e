//! Network devices: `zerosock net` beside the back-ends of QEMU and of user-mode Linux, DPDK and passt.
//!
//! Everything happens in a network namespace of the bench. Guests boot once for a group of cases and
//! are idle while others are measured.

mod cases;
mod daemon;
mod echo;
mod guest;
mod iperf;
mod lan;
mod link;
mod nic;
mod pair;
mod passt;
mod rings;

use std::thread;

use zerosock_cli::vm::qemu;

use crate::args::Settings;
use crate::namespace;
use crate::pair::Cores;
use crate::peers::{dpdk, install};
use crate::report::Table;
use crate::rounds::alternate;
use cases::{
    BACK_END, CPU, Cases, FRAMES, LAN, MB_S, METHOD, NIC_CASES, OUTSIDE, PAIR, RING_CASES, TRIP,
    USER_MODE,
};
pub(crate) use daemon::COMMAND_FILE;
use guest::Image;
use link::Link;
use nic::WAYS;
use rings::RINGS;

struct Bench<'s> {
    settings: &'s Settings,
    cores: Cores,
    /// Of user-mode Linux, and of QEMU; `None`: none of its cases was selected.
    images: [Option<Result<Image, String>>; 2],
    table: Table,
}

/// Measures the table.
pub(crate) fn run(settings: &Settings, cores: Cores, machine: &str) -> Table {
    let mut method = METHOD.to_owned();
    if let Some(version) = qemu::version() {
        method.push_str(&format!(" {version}."));
    }
    // Before the namespace, which has no way to Debian's packages.
    let wants = |cases: &Cases| cases.is_wanted(settings);
    let has_vms = settings.vm && (wants(&LAN) || wants(&PAIR));
    let mut bench = Bench {
        settings,
        cores,
        images: [
            wants(&USER_MODE).then(Image::user_mode),
            has_vms.then(Image::qemu),
        ],
        table: Table {
            name: "net",
            method,
            machine: machine.to_owned(),
            rounds: settings.rounds,
            rows: Vec::new(),
            missing: Vec::new(),
        },
    };
    // A namespace is that of a thread, and of the threads and processes that it starts.
    thread::scope(|scope| {
        let all = scope.spawn(|| match namespace::enter() {
            Ok(()) => bench.all(),
            Err(reason) => bench.table.note_missing("namespace", &reason),
        });
        if all.join().is_err() {
            eprintln!("net: the measuring thread panicked");
        }
    });
    bench.table
}

/// Installs the packages of the peers that are missing, as root or with sudo without a password.
pub(crate) fn install_peers() -> Result<(), String> {
    let mut missing: Vec<&str> = iperf::missing_package().into_iter().collect();
    missing.extend(dpdk::missing_packages());
    match missing.is_empty() {
        true => Ok(()),
        false => install::apt_get(&missing),
    }
}

impl Bench<'_> {
    fn all(&mut self) {
        self.rings();
        self.nic();
        let [user_mode, qemu] = std::mem::take(&mut self.images);
        match user_mode {
            Some(Ok(image)) => {
                let contestants = lan::USER_MODE.map(|one| (one.title(), one));
                self.links(&USER_MODE, &contestants, |one| one.link(&image));
            }
            Some(Err(reason)) => self.table.note_missing("user-mode Linux", &reason),
            None => {}
        }
        match qemu {
            Some(Ok(image)) => self.guests(&image),
            Some(Err(reason)) => self.table.note_missing("VM", &reason),
            None if !self.settings.vm => self.table.note_missing("VM", "add --vm"),
            None => {}
        }
    }

    fn rings(&mut self) {
        let contestants = self.wanted(&RINGS.map(|one| (one.title(), one)));
        for (name, course, size) in RING_CASES {
            if self.settings.wants(name) {
                let (titles, outcomes) =
                    self.outcomes(name, &contestants, |one, settings, cores| {
                        one.measure(course, size, settings, cores)
                    });
                self.table
                    .add_rows(name, FRAMES, &titles, &outcomes, |rate| *rate);
            }
        }
    }

    fn nic(&mut self) {
        let contestants = self.wanted(&WAYS.map(|one| (one.title(), one)));
        for (name, case) in NIC_CASES {
            if self.settings.wants(name) {
                let (titles, outcomes) =
                    self.outcomes(name, &contestants, |one, settings, cores| {
                        one.measure(case, settings, cores)
                    });
                if case.has_own_core {
                    self.table
                        .add_rows(name, MB_S, &titles, &outcomes, |one| one.mb_s);
                } else {
                    self.table
                        .add_rows(name, CPU, &titles, &outcomes, |one| one.cpu_ns);
                }
            }
        }
    }

    fn guests(&mut self, image: &Image) {
        let kernel = format!(" VM: Linux {}.", image.release());
        self.table.method.push_str(&kernel);
        if LAN.is_wanted(self.settings) {
            let contestants = lan::BACKENDS.map(|one| (one.title(), one));
            self.links(&LAN, &contestants, |one| one.link(image));
        }
        if PAIR.is_wanted(self.settings) {
            let contestants = pair::NETWORKS.map(|one| (one.title(), one));
            self.links(&PAIR, &contestants, |one| one.link(image));
        }
    }

    /// The first contestant, and those of the others that were selected.
    fn wanted<C: Copy>(&self, contestants: &[(String, C)]) -> Vec<(String, C)> {
        let contestants = contestants.iter().enumerate();
        let wanted = |title: &str, at| at == 0 || self.settings.is_against(title);
        contestants
            .filter(|(at, (title, _))| wanted(title, *at))
            .map(|(_, contestant)| contestant.clone())
            .collect()
    }

    /// Measures the contestants in turn. Returns their titles, too.
    fn outcomes<C, T>(
        &self,
        name: &str,
        contestants: &[(String, C)],
        measure: impl Fn(&C, &Settings, Cores) -> Result<T, String>,
    ) -> (Vec<String>, Vec<Result<Vec<T>, String>>) {
        let outcomes = alternate(self.settings.rounds, contestants.len(), |round, at| {
            let (title, contestant) = &contestants[at];
            progress!("{name}: round {}, {title}", round + 1);
            measure(contestant, self.settings, self.cores)
        });
        let titles = contestants.iter().map(|(title, _)| title.clone());
        (titles.collect(), outcomes)
    }

    /// Makes a link with each contestant, zerosock first, and measures them in turn.
    fn links<C: Copy>(
        &mut self,
        cases: &Cases,
        contestants: &[(String, C)],
        make: impl Fn(C) -> Result<Link, String>,
    ) {
        let contestants = self.wanted(contestants);
        if contestants.len() < 2 {
            return;
        }
        let links: Vec<_> = contestants
            .into_iter()
            .map(|(title, contestant)| {
                progress!("{}: starting {title}", cases.there);
                (title, make(contestant))
            })
            .collect();
        for (name, reverse) in [(Some(cases.there), false), (cases.back, true)] {
            let Some(name) = name.filter(|name| self.settings.wants(name)) else {
                continue;
            };
            let (titles, outcomes) = self.outcomes(name, &links, |link, settings, _| {
                link.as_ref()
                    .map_err(Clone::clone)?
                    .transfer(reverse, settings)
            });
            self.table
                .add_rows(name, MB_S, &titles, &outcomes, |one| one.mb_s);
            if cases.has_outside {
                self.table
                    .add_rows(name, OUTSIDE, &titles, &outcomes, |one| {
                        one.outside_s_per_gb
                    });
                self.table
                    .add_rows(name, BACK_END, &titles, &outcomes, |one| {
                        one.back_end_s_per_gb
                    });
            }
        }
        let name = cases.ping;
        if self.settings.wants(name) {
            let (titles, outcomes) = self.outcomes(name, &links, |link, settings, _| {
                link.as_ref().map_err(Clone::clone)?.ping(settings)
            });
            self.table
                .add_rows(name, TRIP, &titles, &outcomes, |one| *one);
        }
    }
}
