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
pub(crate) mod rings;

use std::fmt::Display;

use zerosock_cli::vm::qemu;

use crate::bench::{Bench, print_progress};
use crate::binary::Binary;
use crate::image::Image;
use crate::namespace;
use crate::pair::Cores;
use crate::peers::{dpdk, install};
use cases::{
    BACK_END, CPU, Cases, FRAMES, LAN, MB_S, METHOD, NIC_CASES, OUTSIDE, PAIR, RING_CASES, TRIP,
    USER_MODE,
};
pub(crate) use daemon::COMMAND_FILE;
use link::Link;
use nic::{WAYS, Way};
use rings::RINGS;

/// A kernel for guests, with its programs, or why there is none; `None`: none of its cases was selected.
type MaybeImage = Option<Result<Image, String>>;

/// Measures the table.
pub(crate) fn run(bench: &mut Bench<'_>) {
    METHOD.clone_into(&mut bench.table.method);
    if let Some(version) = qemu::version() {
        bench.table.method.push_str(&format!(" {version}."));
    }
    // Before the namespace, which has no way to Debian's packages.
    let wants = |cases: &Cases| cases.is_wanted(bench.settings);
    let has_vms = bench.settings.vm && (wants(&LAN) || wants(&PAIR));
    let user_mode = wants(&USER_MODE).then(guest::user_mode_image);
    let qemu = has_vms.then(guest::qemu_image);
    namespace::on_thread(|entered| match entered {
        Ok(()) => all(bench, user_mode, qemu),
        Err(reason) => bench.table.note_missing("namespace", &reason),
    });
}

/// Installs the packages of the peers that are missing, as root or with sudo without a password.
pub(crate) fn install_peers() -> Result<(), String> {
    let mut missing: Vec<&str> = iperf::missing_package().into_iter().collect();
    missing.extend(dpdk::missing_packages());
    install::apt_get(&missing)
}

fn all(bench: &mut Bench<'_>, user_mode: MaybeImage, qemu: MaybeImage) {
    rings(bench);
    nic(bench);
    match user_mode {
        Some(Ok(image)) => {
            let release = lan::UserMode::Zerosock;
            links(bench, &USER_MODE, lan::USER_MODE, release, |one, cores| {
                one.link(&image, cores)
            });
        }
        Some(Err(reason)) => bench.table.note_missing("user-mode Linux", &reason),
        None => {}
    }
    match qemu {
        Some(Ok(image)) => guests(bench, &image),
        Some(Err(reason)) => bench.table.note_missing("VM", &reason),
        None if !bench.settings.vm => bench.table.note_missing("VM", "add --vm"),
        None => {}
    }
}

fn rings(bench: &mut Bench<'_>) {
    if !bench.settings.releases.is_empty() {
        return compared_rings(bench);
    }
    let contestants = bench.wanted(RINGS.map(|one| (one.title(), one)));
    for (name, course, size) in RING_CASES {
        if bench.settings.wants(name) {
            let outcomes =
                bench.measure(name, &contestants, |one| one.measure(course, size, bench));
            bench.table.add_rows(name, FRAMES, &outcomes, |rate| *rate);
        }
    }
}

/// The rings of each release, in the table of the first placement: both sides are in one process, which
/// chooses their cores.
fn compared_rings(bench: &mut Bench<'_>) {
    let first = bench.settings.placements.first().map(ToString::to_string);
    if bench.table.placement != first {
        return;
    }
    let own = [(Binary::OWN.title(), Binary::OWN)];
    let contestants = bench.wanted_with(own, |release| release);
    for (name, ..) in RING_CASES {
        if bench.settings.wants(name) {
            let run = |binary: &_| rings::measure_in(*binary, name, bench.settings);
            let outcomes = bench.measure(name, &contestants, run);
            bench.table.add_rows(name, FRAMES, &outcomes, |rate| *rate);
        }
    }
}

fn nic(bench: &mut Bench<'_>) {
    if bench.table.placement.is_some() {
        return placed_nic(bench);
    }
    let contestants = bench.wanted(WAYS);
    for (name, case) in NIC_CASES {
        if bench.settings.wants(name) {
            let outcomes = bench.measure(name, &contestants, |one| one.measure(case, bench));
            let table = &mut bench.table;
            if case.has_own_core {
                table.add_rows(name, MB_S, &outcomes, |one| one.mb_s);
            } else {
                table.add_rows(name, CPU, &outcomes, |one| one.cpu_ns);
            }
        }
    }
}

/// The cases at a network card, with the device where the placement has it: both figures of each, and both
/// ways in comparison with other releases.
fn placed_nic(bench: &mut Bench<'_>) {
    let [xdp, bridge] = WAYS;
    let mut groups = vec![("", bench.wanted_with([xdp, bridge], Way::Xdp))];
    if !bench.settings.releases.is_empty() {
        groups.push((", TAP and bridge", bench.wanted_with([bridge], Way::Bridge)));
    }
    let has_own_core = bench.cores.are_two();
    for (name, case) in NIC_CASES.into_iter().filter(|(_, case)| !case.has_own_core) {
        for (end, contestants) in &groups {
            let name = format!("{name}{end}");
            if bench.settings.wants(&name) {
                let case = nic::Case {
                    has_own_core,
                    ..case
                };
                let outcomes = bench.measure(&name, contestants, |one| one.measure(case, bench));
                bench.table.add_rows(&name, MB_S, &outcomes, |one| one.mb_s);
                bench
                    .table
                    .add_rows(&name, CPU, &outcomes, |one| one.cpu_ns);
            }
        }
    }
}

fn guests(bench: &mut Bench<'_>, image: &Image) {
    let kernel = format!(" VM: Linux {}.", image.kernel.release);
    bench.table.method.push_str(&kernel);
    if LAN.is_wanted(bench.settings) {
        let contestants = lan::BACKENDS.map(|one| (one.title(), one));
        let release = lan::Backend::Zerosock;
        links(bench, &LAN, contestants, release, |one, cores| {
            one.link(image, cores)
        });
    }
    if PAIR.is_wanted(bench.settings) {
        let release = pair::Network::Zerosock;
        links(bench, &PAIR, pair::NETWORKS, release, |one, cores| {
            one.link(image, cores)
        });
    }
}

/// Makes a link with each contestant, zerosock first, and measures them in turn.
fn links<C>(
    bench: &mut Bench<'_>,
    cases: &Cases,
    contestants: impl IntoIterator<Item = (impl Display, C)>,
    release: impl Fn(Binary) -> C,
    make: impl Fn(C, Cores) -> Result<Link, String>,
) {
    let settings = bench.settings;
    let contestants = bench.wanted_with(contestants, release);
    let cores = bench.placed_cores();
    if contestants.len() < 2 {
        return;
    }
    let links: Vec<_> = contestants
        .into_iter()
        .map(|(title, contestant)| {
            print_progress(&format!("{}: starting {title}", cases.there));
            (title, make(contestant, cores))
        })
        .collect();
    for (name, reverse) in [(Some(cases.there), false), (cases.back, true)] {
        let Some(name) = name.filter(|name| settings.wants(name)) else {
            continue;
        };
        let outcomes = bench.measure(name, &links, |link| {
            let link = link.as_ref().map_err(Clone::clone)?;
            link.transfer(reverse, settings)
        });
        let table = &mut bench.table;
        table.add_rows(name, MB_S, &outcomes, |one| one.mb_s);
        if cases.has_outside {
            table.add_rows(name, OUTSIDE, &outcomes, |one| one.outside_s_per_gb);
            table.add_rows(name, BACK_END, &outcomes, |one| one.back_end_s_per_gb);
        }
    }
    let name = cases.ping;
    if settings.wants(name) {
        let outcomes = bench.measure(name, &links, |link| {
            link.as_ref().map_err(Clone::clone)?.ping(settings)
        });
        bench.table.add_rows(name, TRIP, &outcomes, |one| *one);
    }
}
