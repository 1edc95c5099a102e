//! A long run of `zerosock serve` (`make soak`): mixed traffic between guests, programs of the host and processes that
//! attach, with guests that reset, processes that are killed, upgrades and reloads at random moments.
//!
//! # What fails it
//! - Contents that are not what was sent, a call that waits for a minute, and a connection that ends, or cannot be made,
//!   without an event that explains it: at a kill all may end; at an upgrade, those of attached processes; at a reset, those
//!   of the guest.
//! - Growth of memory, descriptors or threads (`samples`), and connections that stay when the traffic has stopped.
//!
//! In the first half the process that serves is killed and upgraded now and then. In the second half it stays the same, so
//! that its memory can be compared.

mod common;
mod lab;
mod page;
mod player;
mod sampler;
mod samples;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Parser;
use signal_hook::consts::{SIGINT, SIGTERM};

pub use common::NAME;
use common::{AFTER, Random, now};
use lab::{Event, Failure, Lab};

#[derive(Parser)]
#[command(
    name = "zerosock-testkit soak",
    about = "Serves mixed traffic for long, with kills, upgrades and reloads"
)]
struct Args {
    /// How long there is traffic.
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Repeats the choices of another run; default: a random one.
    #[arg(long)]
    seed: Option<u64>,
    /// The page to write.
    #[arg(long, default_value = "soak.html")]
    page: PathBuf,
    #[arg(long, hide = true, requires = "dir")]
    player: Option<String>,
    #[arg(long, hide = true)]
    dir: Option<PathBuf>,
}

/// The subcommand: exit code 1 if something failed.
pub fn main() -> ExitCode {
    let args = Args::parse_from(std::env::args_os().skip(1));
    let seed = args.seed.unwrap_or_else(|| (now() * 1e6) as u64);
    let result = match (args.player, args.dir) {
        (Some(name), Some(dir)) => player::play(&dir, &name, seed).map(|()| true),
        _ => run(args.minutes * 60.0, seed, &args.page),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("soak: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(seconds: f64, seed: u64, page: &std::path::Path) -> std::io::Result<bool> {
    println!("soak: {seconds} s, --seed {seed}");
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, interrupted.clone())?;
        signal_hook::flag::register(signal, interrupted.clone())?;
    }
    let mut random = Random::new(seed);
    let mut lab = Lab::start(seed, page.with_extension("log"))?;
    // Before and after the traffic a process of the same age serves.
    lab.upgrade()?;
    let before = lab.sample_idle()?;
    let sampler = sampler::Sampler::start(&lab);
    lab.go()?;
    let began = now();
    let (mut bag, mut bags, mut quiet_from) = (Vec::new(), 0, None);
    while now() < began + seconds && !interrupted.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(300 + random.below(2500)));
        if quiet_from.is_none() && bags > 1 && now() > began + seconds / 2.0 {
            quiet_from = Some(now());
        }
        if bag.is_empty() {
            bag = vec!["kill", "upgrade", "reset", "attached", "reload"];
            bags += 1;
        }
        let kind = bag.swap_remove(random.below(bag.len() as u64) as usize);
        match kind {
            "kill" if quiet_from.is_none() => lab.kill()?,
            "upgrade" if quiet_from.is_none() => lab.upgrade()?,
            "reset" => lab.restart(["guest3", "guest4"][random.below(2) as usize])?,
            "attached" => lab.restart("attached")?,
            "reload" => lab.reload()?,
            _ => {}
        }
    }
    println!("soak: the traffic stops");
    let ended = now();
    sampler.stop();
    lab.stop_traffic()?;
    lab.upgrade()?;
    let after = lab.sample_idle_as(&before)?;
    let samples = sampler.take();
    let state = lab.end()?;

    let mut faults = state.faults.clone();
    let (explained, others): (Vec<_>, Vec<_>) = state
        .failures
        .iter()
        .partition(|it| is_explained(it, &state.events));
    faults.extend(others.iter().take(50).map(|it| it.show(began)));
    let quiet_from = quiet_from.unwrap_or(ended);
    faults.extend(samples::growth(&samples, began, quiet_from));
    faults.extend(samples::left(&before, &after));
    let mut text = format!("soak: {:.0} s of traffic, --seed {seed}\n", ended - began);
    let mut kinds = BTreeMap::<_, (u32, f64)>::new();
    for event in &state.events {
        let kind = kinds.entry(event.kind).or_default();
        *kind = (kind.0 + 1, kind.1.max(event.end - event.begin));
    }
    for (kind, (count, longest)) in kinds {
        text += &format!(
            "  {count:6} × {kind}, the longest {:.0} ms\n",
            longest * 1e3
        );
    }
    for (kind, (count, bytes)) in &state.done {
        text += &format!(
            "  {count:6} connections of {kind}, {:.1} MB\n",
            *bytes as f64 / 1e6
        );
    }
    text += &format!(
        "  {:6} connections ended or were refused because of events\n",
        explained.len()
    );
    text += &samples::summary(&samples, began, quiet_from, &before, &after);
    for fault in &faults {
        text += &format!("FAULT {fault}\n");
    }
    text += if faults.is_empty() {
        "passed\n"
    } else {
        "failed\n"
    };
    print!("{text}");
    std::fs::write(page, page::draw(&samples, &state.events, began, &text))?;
    println!("the page: {}", page.display());
    Ok(faults.is_empty())
}

/// Whether an event explains that a connection has ended, or was not made.
fn is_explained(failure: &Failure, events: &[Event]) -> bool {
    let concerns = |name: &str| failure.player == name || failure.peer == name;
    let may_end = |event: &Event| {
        let all = event.kind == "kill";
        all || event.kind == "upgrade" && concerns("attached") || concerns(&event.subject)
    };
    let is_error = failure.class == "connect" || failure.class == "ended";
    // A rule and a VM that come and go.
    let comes_and_goes = concerns("late") || concerns("guest6");
    is_error
        && (comes_and_goes
            || events.iter().any(|event| {
                may_end(event) && event.begin <= failure.ended && failure.began <= event.end + AFTER
            }))
}
