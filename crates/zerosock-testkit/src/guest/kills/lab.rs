//! The loop: attaches and detaches, kills, and compares what is left with what there was.

use std::fs;
use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use zerosock_cli::vm::pattern::Pattern;

use super::patterns::{Patterns, available, free_huge_pages};
use super::processes::{Agent, Client, Usage, keeper, wait_for_end_of_keeper};
use super::terms::{HOW, Order, PAGES, wait_until};

/// Huge pages of the guest, and of an endpoint.
const ALL_PAGES: u64 = 16;
const PAGES_EACH: u64 = 1;
/// Clients that stream at a time.
const CLIENTS: usize = 2;
/// Longest time, in microseconds, between a client's last step and its end.
const LONGEST_PAUSE: u64 = 30_000;
/// Bytes each way in a cycle.
const CYCLE_BYTES: u64 = 4096;
/// Cycles after which the agent has all memory that it needs.
const WARM_UP: u64 = 20;
/// Memory that the kernel may keep. Its estimate of what is available varies by tens of megabytes.
const KERNEL: u64 = 64 << 20;
/// Time between two lines about the progress.
const PROGRESS: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(in crate::guest) struct Options {
    /// The key file
    #[arg(long)]
    key: String,
    /// The port of the host
    #[arg(long)]
    port: u32,
    /// Attachments that end by themselves
    #[arg(long)]
    cycles: u64,
    /// Kills, in turn of a client, of the agent, and of all but the keeper
    #[arg(long)]
    kills: u64,
    /// Of everything that is random
    #[arg(long)]
    seed: u64,
}

/// Which processes are killed.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Kill {
    Client,
    Agent,
    AllButKeeper,
}

const KILLS: [Kill; 3] = [Kill::Client, Kill::Agent, Kill::AllButKeeper];

/// Attaches and detaches, then kills.
pub(super) fn run(options: &Options) -> io::Result<()> {
    fs::write("/proc/sys/vm/nr_hugepages", ALL_PAGES.to_string())?;
    if free_huge_pages()? != ALL_PAGES {
        return Err(io::Error::other("the guest has not enough huge pages"));
    }
    let before = available()?;
    let agent = Agent::start(&options.key)?;
    let mut lab = Lab {
        options,
        random: Pattern::new(options.seed),
        patterns: Patterns::start(),
        agent: Some(agent),
        clients: Vec::new(),
        started: 0,
        told: Instant::now(),
    };
    let begin = Instant::now();
    lab.cycle(WARM_UP.min(options.cycles))?;
    let usage = lab.usage()?;
    lab.cycle(options.cycles.saturating_sub(WARM_UP))?;
    println!("{} attachments in {:?}", options.cycles, begin.elapsed());
    lab.assert_usage(usage)?;

    let begin = Instant::now();
    let mut counts = [0; KILLS.len()];
    for done in 0..options.kills {
        let index = done as usize % KILLS.len();
        let kill = KILLS[index];
        let name = |error| io::Error::other(format!("kill {done}, {kill:?}: {error}"));
        lab.kill(kill).map_err(name)?;
        counts[index] += 1;
        lab.tell(&format!("{done} kills"));
    }
    println!("kills: {KILLS:?}: {counts:?} in {:?}", begin.elapsed());
    lab.end_clients()?;
    lab.wait_for_pages()?;
    lab.assert_usage(usage)?;
    lab.end(before)
}

/// Everything that runs in the guest.
struct Lab<'o> {
    options: &'o Options,
    random: Pattern,
    patterns: Patterns,
    agent: Option<Agent>,
    clients: Vec<Client>,
    /// Clients that were started.
    started: u64,
    told: Instant,
}

impl Lab<'_> {
    /// Attaches and detaches.
    fn cycle(&mut self, cycles: u64) -> io::Result<()> {
        // An endpoint may begin before the pages of the one before are free.
        self.patterns.leave(2 * PAGES_EACH)?;
        let (cycles, len) = (cycles.to_string(), CYCLE_BYTES.to_string());
        let seed = self.number(u64::from(u32::MAX));
        let options = ["--cycles", &cycles, &len];
        let client = Client::start(self.options.port, seed, &options)?;
        match client.wait()? {
            status if status.success() => {}
            status => return Err(io::Error::other(format!("a client fails: {status}"))),
        }
        self.wait_for_pages()
    }

    /// A random number below a limit.
    fn number(&mut self, below: u64) -> u64 {
        let mut bytes = [0; 8];
        self.random.fill(&mut bytes);
        u64::from_le_bytes(bytes) % below
    }

    fn pause(&mut self) {
        let us = self.number(LONGEST_PAUSE);
        thread::sleep(Duration::from_micros(us));
    }

    /// Starts clients until all run.
    fn start_clients(&mut self) -> io::Result<()> {
        let missing = CLIENTS - self.clients.len();
        self.patterns.leave(PAGES_EACH * missing as u64)?;
        let first = self.clients.len();
        for _ in 0..missing {
            let seed = self.number(u64::MAX);
            let options: &[&str] = match self.number(2) {
                0 => &[],
                _ => &["--paced"],
            };
            let client = Client::start(self.options.port, seed, options)?;
            self.clients.push(client);
            self.started += 1;
        }
        for client in &mut self.clients[first..] {
            client.expect("running")?;
        }
        // All pages that are free from here on get patterns at once.
        self.patterns.leave(0)
    }

    /// Lets a client free its pages, or not. Returns its order.
    fn order(&mut self, index: usize) -> io::Result<Option<Order>> {
        let how = HOW.get(self.number(4) as usize);
        let goes_on = self.number(2) == 1;
        let order = how.map(|&(how, _)| Order { how, goes_on });
        if let Some(order) = order {
            self.clients[index].free_pages(order)?;
        }
        Ok(order)
    }

    fn kill(&mut self, kind: Kill) -> io::Result<()> {
        self.start_clients()?;
        let before = keeper()?;
        let has_pins = if kind == Kill::Client {
            let index = self.number(CLIENTS as u64) as usize;
            let order = self.order(index)?;
            self.pause();
            let mut client = self.clients.remove(index);
            client.kill()?;
            client.wait_for_kill(order)?;
            true
        } else {
            let mut orders = Vec::new();
            for index in 0..CLIENTS {
                orders.push(self.order(index)?);
            }
            self.pause();
            let has_pins = self.kill_agent(kind, &orders)?;
            // There is no agent: the keeper alone keeps the pages.
            self.pause();
            self.agent = Some(Agent::start(&self.options.key)?);
            has_pins
        };
        self.wait_for_pages()?;
        let now = keeper()?;
        if has_pins && now != before || now.is_none() {
            let text = format!("the keeper was process {before:?} and is {now:?}");
            return Err(io::Error::other(text));
        }
        Ok(())
    }

    /// Kills the agent, and the clients before or after it or not at all. Returns whether there must have been an endpoint:
    /// without one, the keeper ends with the agent.
    fn kill_agent(&mut self, kind: Kill, orders: &[Option<Order>]) -> io::Result<bool> {
        let mut agent = self.agent.take().ok_or(io::ErrorKind::NotFound)?;
        let is_first = kind == Kill::Agent || self.number(2) == 0;
        if is_first {
            agent.kill()?;
        }
        let mut clients: Vec<Client> = self.clients.drain(..).collect();
        if kind == Kill::AllButKeeper {
            clients.iter_mut().try_for_each(Client::kill)?;
        }
        if !is_first {
            agent.kill()?;
        }
        agent.wait()?;
        for (mut client, &order) in clients.into_iter().zip(orders) {
            if kind == Kill::Agent && order.is_none() {
                // It learns of the end.
                client.expect("ended")?;
                client.wait()?;
            } else {
                client.kill()?;
                client.wait_for_kill(order)?;
            }
        }
        // One that goes on without its pages may have died of it.
        let lives = |order: &Option<Order>| !order.is_some_and(|it| it.goes_on);
        Ok(is_first && orders.iter().any(lives))
    }

    fn end_clients(&mut self) -> io::Result<()> {
        for mut client in self.clients.drain(..) {
            client.kill()?;
            client.wait_for_kill(None)?;
        }
        Ok(())
    }

    /// Waits until all pages but those of clients that run are free, and have patterns.
    fn wait_for_pages(&self) -> io::Result<()> {
        let clients = self.clients.len();
        wait_until(|| {
            self.patterns.fault()?;
            let files = fs::read_dir(PAGES)?.count();
            let free = free_huge_pages()? + self.patterns.held();
            let is_done = files == clients && free == ALL_PAGES - PAGES_EACH * clients as u64;
            Ok((!is_done).then(|| {
                format!(
                    "{clients} clients run, {files} files are left, {free} of {ALL_PAGES} huge pages are free"
                )
            }))
        })
    }

    /// What agent and keeper use.
    fn usage(&self) -> io::Result<[Usage; 2]> {
        let agent = self.agent.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let keeper = keeper()?.ok_or(io::ErrorKind::NotFound)?;
        Ok([Usage::of(agent.id())?, Usage::of(keeper)?])
    }

    fn assert_usage(&self, before: [Usage; 2]) -> io::Result<()> {
        let mut now = self.usage()?;
        // The threads of the last clients end.
        wait_until(|| {
            now = self.usage()?;
            let pairs = now.iter().zip(&before);
            let is_like = pairs.into_iter().all(|(now, before)| now.is_like(before));
            Ok((!is_like).then(|| format!("agent and keeper use {now:?}, {before:?} before")))
        })?;
        println!("agent and keeper: {before:?}, then {now:?}");
        Ok(())
    }

    /// Ends everything.
    fn end(mut self, before: u64) -> io::Result<()> {
        let agent = self.agent.take().ok_or(io::ErrorKind::NotFound)?;
        agent.terminate()?;
        wait_for_end_of_keeper()?;
        println!(
            "patterns in {} MiB and {} huge pages, {} MiB unchanged, {} clients",
            self.patterns.small() >> 20,
            self.patterns.held(),
            self.patterns.checked() >> 20,
            self.started
        );
        self.patterns.stop()?;
        wait_until(|| {
            let (files, free) = (fs::read_dir(PAGES)?.count(), free_huge_pages()?);
            let is_done = files == 0 && free == ALL_PAGES;
            Ok((!is_done).then(|| format!("{files} files, {free} of {ALL_PAGES} huge pages free")))
        })?;
        let mut now = 0;
        // The kernel frees the memory of processes that have ended, and counts it, a little later.
        wait_until(|| {
            now = available()?;
            Ok((now + KERNEL < before).then(|| {
                let (now, before) = (now >> 20, before >> 20);
                format!("memory of the guest is not free again: {now} MiB, {before} MiB before")
            }))
        })?;
        println!("{} MiB available, {} MiB before", now >> 20, before >> 20);
        Ok(())
    }

    /// To the console: the outcome is long in coming.
    fn tell(&mut self, text: &str) {
        if self.told.elapsed() > PROGRESS {
            self.told = Instant::now();
            let console = fs::File::options().write(true).open("/dev/console");
            let _ = console.and_then(|mut it| writeln!(it, "{text}"));
        }
    }
}
