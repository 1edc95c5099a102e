//! Many connections through a relay: memory of idle ones, memory left by those that have ended, and
//! how fast they come and go.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use zerosock_relay::relay::Way;

use super::address::{Address, Kind};
use super::load::{self, Phase, Server};
use super::programs::{Load, Relay};
use super::running::Running;
use crate::args::Settings;
use crate::pair::Cores;
use crate::processes;

/// First connections, which pay for what a relay allocates once.
pub(super) const FIRST: usize = 256;
/// Short connections that a relay is told to allow: those in use, and those that it is closing.
const SHORT: usize = 2000;
/// Time in which a relay that has closed everything closes nothing more.
const QUIET: Duration = Duration::from_millis(200);
/// Longest time to close what belongs to connections that have ended.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `measure` with a server and a relay in front of it, the relay on the receiver's core, the
/// rest on the sender's, but the server on that of the host.
fn with_relay<T: Send>(
    relay: Relay,
    most: usize,
    cores: Cores,
    measure: impl FnOnce(&Running, SocketAddr) -> Result<T, String> + Send,
) -> Result<T, String> {
    processes::on_core(cores.sender, || {
        let server = processes::starting_on(cores.host, Server::start)??;
        let target = Address::Tcp(server.address);
        let load = Load::Many(most);
        let running = Running::start(relay, Kind::Tcp, &target, load, cores.receiver)?;
        let Address::Tcp(entrance) = running.from else {
            return Err("a relay from TCP".to_owned());
        };
        let measured = measure(&running, entrance).map_err(|reason| running.explain(reason))?;
        match (relay, running.warning()) {
            (Relay::Zerosock(way), Some(reason)) if way != Way::Auto => Err(reason),
            _ => Ok(measured),
        }
    })
}

/// User memory of each of `count` idle connections, bytes.
pub(super) fn idle(relay: Relay, count: usize, cores: Cores) -> Result<f64, String> {
    let first = FIRST.min(count / 4);
    with_relay(relay, first + count, cores, |running, entrance| {
        let _first = load::hold(entrance, first)?;
        let before = processes::user_memory(running.id())?;
        let _held = load::hold(entrance, count)?;
        // Whatever a relay keeps for a moment after the last byte is not memory of an idle one.
        thread::sleep(QUIET);
        let after = processes::user_memory(running.id())?;
        Ok((after - before) / count as f64)
    })
}

/// User memory of a relay before and after `count` connections, bytes.
pub(super) fn growth(relay: Relay, count: u64, cores: Cores) -> Result<[f64; 2], String> {
    with_relay(relay, SHORT, cores, |running, entrance| {
        let make = |count| {
            load::short(entrance, |done| {
                Ok(if done < count {
                    Phase::Count
                } else {
                    Phase::End
                })
            })?;
            settle(running.id())?;
            processes::user_memory(running.id())
        };
        Ok([make(count / 100)?, make(count)?])
    })
}

/// Waits until a relay has closed the descriptors of connections that have ended.
fn settle(id: u32) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    let (mut open, mut since) = (processes::descriptors(id)?, Instant::now());
    while since.elapsed() < QUIET {
        thread::sleep(QUIET / 10);
        let now = processes::descriptors(id)?;
        if now != open {
            (open, since) = (now, Instant::now());
        }
        if Instant::now() > deadline {
            return Err(format!("{open} descriptors {PATIENCE:?} after the end"));
        }
    }
    Ok(())
}

/// How fast connections come and go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    pub(super) per_second: f64,
    /// From the connect to the answer, of 99 of 100 connections.
    pub(super) p99_us: f64,
    /// CPU time of the relay for each connection.
    pub(super) cpu_us: f64,
}

/// Short connections for the time of the settings.
pub(super) fn rate(relay: Relay, settings: &Settings, cores: Cores) -> Result<Rate, String> {
    let Settings { warm, time, .. } = *settings;
    with_relay(relay, SHORT, cores, |running, entrance| {
        let begin = Instant::now();
        let mut counted_from = None;
        let short = load::short(entrance, |done| {
            let now = begin.elapsed();
            if now < warm {
                return Ok(Phase::Warm);
            }
            let cpu = || processes::cpu_seconds(running.id());
            let (used, before) = match counted_from {
                Some(from) => from,
                None => *counted_from.insert((cpu()?, done)),
            };
            // The kernel adds the CPU time of a task that runs when it stops it, or at a clock
            // tick: a short measurement could end with none.
            let is_over = now > warm + time && done > before && cpu()? > used;
            Ok(if is_over { Phase::End } else { Phase::Count })
        })?;
        let (cpu, _) = counted_from.ok_or("no measurement")?;
        let cpu = processes::cpu_seconds(running.id())? - cpu;
        let count = short.count as f64;
        Ok(Rate {
            per_second: count / short.time.as_secs_f64(),
            p99_us: short.p99 as f64 / 1e3,
            cpu_us: cpu * 1e6 / count,
        })
    })
}
