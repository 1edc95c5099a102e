//! The processes of a long run: `zerosock serve` with its supervisor, and the players.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use zerosock_cli::vm::hybrid;

use super::common::{self, GUESTS, HANG, STEADY, now};
use super::player::{ECHO, LATE, TCP, UDP};
use super::samples::{self, Counts};

/// The guest that is never reset.
const PINGED: u32 = 5;

/// Something that was done to the processes, between two times.
#[derive(Clone)]
pub(super) struct Event {
    pub(super) kind: &'static str,
    /// The player of a restart.
    pub(super) subject: String,
    pub(super) begin: f64,
    pub(super) end: f64,
}

/// A connection of a player that was not made, or ended, between two times.
pub(super) struct Failure {
    pub(super) player: String,
    pub(super) peer: String,
    /// `connect`, `ended`, `hang` or `wrong`.
    pub(super) class: String,
    pub(super) began: f64,
    pub(super) ended: f64,
    text: String,
}

impl Failure {
    /// A line about it, with times since the start.
    pub(super) fn show(&self, start: f64) -> String {
        let (began, ended) = (self.began - start, self.ended - start);
        let Failure {
            player,
            peer,
            class,
            text,
            ..
        } = self;
        format!("{player} to {peer}, {class}, from {began:.3} to {ended:.3} s: {text}")
    }

    /// Parses what follows `failed`.
    fn parse(player: &str, line: &str) -> Option<Failure> {
        let mut fields = line.splitn(5, ' ');
        Some(Failure {
            player: player.to_owned(),
            began: fields.next()?.parse().ok()?,
            ended: fields.next()?.parse().ok()?,
            peer: fields.next()?.to_owned(),
            class: fields.next()?.to_owned(),
            text: fields.next()?.to_owned(),
        })
    }
}

/// What the processes have said.
#[derive(Default)]
pub(super) struct State {
    pub(super) failures: Vec<Failure>,
    pub(super) faults: Vec<String>,
    pub(super) events: Vec<Event>,
    /// Connections and bytes by kind.
    pub(super) done: BTreeMap<String, (u64, u64)>,
    /// Lines that are waited for: upgrades, reloads, and by player `ready` and `stopped`.
    lines: BTreeMap<String, Vec<String>>,
    connections: u64,
}

/// State that threads share.
#[derive(Clone, Default)]
pub(super) struct Shared(Arc<(Mutex<State>, Condvar)>);

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().expect("no panic")
    }

    fn count(&self, key: &str) -> usize {
        self.lock().lines.get(key).map_or(0, Vec::len)
    }

    fn add(&self, key: &str, line: &str) {
        let mut state = self.lock();
        state
            .lines
            .entry(key.to_owned())
            .or_default()
            .push(line.to_owned());
        self.0.1.notify_all();
    }

    /// Waits until there are more than `before` lines of this key, and returns the last one.
    fn wait(&self, key: &str, before: usize) -> io::Result<String> {
        let missing = |state: &mut State| state.lines.get(key).map_or(0, Vec::len) <= before;
        let waiting = self.0.1.wait_timeout_while(self.lock(), HANG * 2, missing);
        let (state, timeout) = waiting.expect("no panic");
        let last = state.lines.get(key).and_then(|lines| lines.last());
        let last = last.filter(|_| !timeout.timed_out()).cloned();
        last.ok_or_else(|| io::Error::other(format!("waited in vain for: {key}")))
    }
}

struct Player {
    child: Child,
    stdin: Option<ChildStdin>,
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The processes.
pub(super) struct Lab {
    players: BTreeMap<String, Player>,
    serve: Child,
    dir: tempfile::TempDir,
    shared: Shared,
    seed: u64,
    /// Addresses of the targets of rules: TCP, UDP.
    targets: (String, String),
    /// Whether the rule and the VM that come and go are there.
    late: bool,
}

impl Drop for Lab {
    fn drop(&mut self) {
        // The supervisor ends its process with it.
        let _ = kill_process(Pid::from_child(&self.serve), Signal::TERM);
        let deadline = Instant::now() + HANG / 6;
        while matches!(self.serve.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.serve.kill();
        let _ = self.serve.wait();
    }
}

/// This program, apart from the terminal's signals.
fn command() -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.process_group(0);
    Ok(command)
}

impl Lab {
    /// Starts all of them, without traffic.
    pub(super) fn start(seed: u64, log: PathBuf) -> io::Result<Lab> {
        let dir = tempfile::tempdir()?;
        let shared = Shared::default();
        let host = Player::start(dir.path(), "host", seed, &shared)?;
        let ready = shared.wait("host ready", 0)?;
        let (tcp, udp) = ready.split_once(' ').unwrap_or_default();
        let targets = (tcp.to_owned(), udp.to_owned());
        write_file(dir.path(), &targets, false)?;
        let mut serve = command()?;
        serve
            .args(["serve", "--config"])
            .arg(dir.path().join("vms.yaml"));
        serve.env("RUST_LOG", "info").env_remove("NOTIFY_SOCKET");
        serve
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut serve = serve.spawn()?;
        if let Some(stderr) = serve.stderr.take() {
            let (shared, log) = (shared.clone(), fs::File::create(log)?);
            thread::spawn(move || follow_log(stderr, log, &shared));
        }
        let players = BTreeMap::from([("host".to_owned(), host)]);
        let mut lab = Lab {
            players,
            serve,
            dir,
            shared,
            seed,
            targets,
            late: false,
        };
        for cid in STEADY {
            lab.add(&format!("guest{cid}"))?;
        }
        lab.add("attached")?;
        Ok(lab)
    }

    fn add(&mut self, name: &str) -> io::Result<()> {
        let before = self.shared.count(&format!("{name} ready"));
        self.seed += 1;
        let player = Player::start(self.dir.path(), name, self.seed, &self.shared)?;
        self.players.insert(name.to_owned(), player);
        self.shared.wait(&format!("{name} ready"), before).map(drop)
    }

    fn tell(&mut self, name: &str, what: &str) -> io::Result<()> {
        let stdin = self
            .players
            .get_mut(name)
            .and_then(|player| player.stdin.as_mut());
        let told = stdin.map(|stdin| stdin.write_all(what.as_bytes()));
        told.unwrap_or(Ok(()))
            .map_err(|error| io::Error::other(format!("{name} has ended: {error}")))
    }

    /// Starts the traffic.
    pub(super) fn go(&mut self) -> io::Result<()> {
        let names: Vec<_> = self.players.keys().cloned().collect();
        names.iter().try_for_each(|name| self.tell(name, "go\n"))
    }

    /// Stops the traffic and what comes and goes.
    pub(super) fn stop_traffic(&mut self) -> io::Result<()> {
        let names: Vec<_> = self.players.keys().cloned().collect();
        names
            .iter()
            .try_for_each(|name| self.tell(name, "stop\n"))?;
        for name in &names {
            self.shared.wait(&format!("{name} stopped"), 0)?;
        }
        if self.late { self.reload() } else { Ok(()) }
    }

    fn event(
        &mut self,
        kind: &'static str,
        subject: &str,
        act: impl FnOnce(&mut Lab) -> io::Result<()>,
    ) -> io::Result<()> {
        let begin = now();
        let result = act(self);
        let result = result.map_err(|error| io::Error::other(format!("{kind} {subject}: {error}")));
        let event = Event {
            kind,
            subject: subject.to_owned(),
            begin,
            end: now(),
        };
        self.shared.lock().events.push(event);
        result
    }

    /// SIGKILL to the process that serves, until a successor serves.
    pub(super) fn kill(&mut self) -> io::Result<()> {
        self.event("kill", "", |lab| {
            let killed = worker(lab.serve.id()).ok_or_else(|| io::Error::other("none serves"))?;
            kill_process(killed, Signal::KILL)?;
            let deadline = Instant::now() + HANG;
            while worker(lab.serve.id()).is_none_or(|pid| pid == killed) || lab.ping().is_err() {
                if Instant::now() > deadline {
                    return Err(io::Error::other("no successor serves"));
                }
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        })
    }

    fn ping(&self) -> io::Result<()> {
        Ping::connect(self.dir.path())?.ping().map(drop)
    }

    pub(super) fn upgrade(&mut self) -> io::Result<()> {
        self.event("upgrade", "", |lab| {
            // A successor serves before it says that it is ready, and until then there is no upgrade.
            while lab.signal_and_wait(Signal::USR2, "upgraded")? == "no upgrade" {
                thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        })
    }

    fn signal_and_wait(&self, signal: Signal, key: &str) -> io::Result<String> {
        let before = self.shared.count(key);
        kill_process(Pid::from_child(&self.serve), signal)?;
        self.shared.wait(key, before)
    }

    /// Adds a rule and a VM, or removes them.
    pub(super) fn reload(&mut self) -> io::Result<()> {
        self.event("reload", "", |lab| {
            lab.late = !lab.late;
            let name = format!("guest{}", GUESTS[3]);
            write_file(lab.dir.path(), &lab.targets, lab.late)?;
            lab.signal_and_wait(Signal::HUP, "reloaded")?;
            if lab.late {
                lab.add(&name)?;
                return lab.tell(&name, "go\n");
            }
            lab.players.remove(&name);
            Ok(())
        })
    }

    /// Kills a player, and starts it again.
    pub(super) fn restart(&mut self, name: &'static str) -> io::Result<()> {
        let kind = if name == "attached" {
            "processes killed"
        } else {
            "guest reset"
        };
        self.event(kind, name, |lab| {
            lab.players.remove(name);
            lab.add(name)?;
            lab.tell(name, "go\n")
        })
    }

    /// The supervisor's process, the directory, and what is said, for samples.
    pub(super) fn parts(&self) -> (u32, PathBuf, Shared) {
        (
            self.serve.id(),
            self.dir.path().to_owned(),
            self.shared.clone(),
        )
    }

    /// The counts without traffic.
    pub(super) fn sample_idle(&self) -> io::Result<Counts> {
        self.signal_and_wait(Signal::USR1, "counters")?;
        Ok(counts(self.serve.id(), &self.shared))
    }

    /// The same, as soon as they are as they were, or after a time.
    pub(super) fn sample_idle_as(&self, before: &Counts) -> io::Result<Counts> {
        let deadline = Instant::now() + HANG / 2;
        loop {
            let counts = self.sample_idle()?;
            if samples::left(before, &counts).is_empty() || Instant::now() > deadline {
                return Ok(counts);
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// Ends all; returns what was said.
    pub(super) fn end(mut self) -> io::Result<State> {
        for player in self.players.values_mut() {
            // Its standard input is still open: it has to be there.
            if let Some(status) = player.child.try_wait()? {
                self.shared
                    .lock()
                    .faults
                    .push(format!("a player has ended: {status}"));
            }
        }
        let shared = self.shared.clone();
        drop(self);
        let died = shared.count("killed");
        let kills = shared
            .lock()
            .events
            .iter()
            .filter(|it| it.kind == "kill")
            .count();
        if kills != died {
            let fault = format!("{died} processes that serve were killed, {kills} of them here");
            shared.lock().faults.push(fault);
        }
        Ok(std::mem::take(&mut *shared.lock()))
    }
}

impl Player {
    fn start(dir: &Path, name: &str, seed: u64, shared: &Shared) -> io::Result<Player> {
        let mut player = command()?;
        player.args([
            common::NAME,
            "--player",
            name,
            "--seed",
            &seed.to_string(),
            "--dir",
        ]);
        player.arg(dir).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = player.spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (name, shared) = (name.to_owned(), shared.clone());
        thread::spawn(move || {
            for line in BufReader::new(stdout.expect("a pipe"))
                .lines()
                .map_while(Result::ok)
            {
                let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
                match word {
                    "done" => {
                        let (kind, bytes) = rest.split_once(' ').unwrap_or((rest, ""));
                        let mut state = shared.lock();
                        let done = state.done.entry(kind.to_owned()).or_default();
                        *done = (done.0 + 1, done.1 + bytes.parse::<u64>().unwrap_or(0));
                    }
                    "failed" => shared.lock().failures.extend(Failure::parse(&name, rest)),
                    _ => shared.add(&format!("{name} {word}"), rest),
                }
            }
        });
        Ok(Player { child, stdin })
    }
}

/// An idle connection to a guest, for latencies.
pub(super) struct Ping(std::os::unix::net::UnixStream);

impl Ping {
    pub(super) fn connect(dir: &Path) -> io::Result<Ping> {
        let path: PathBuf = dir.join(format!("uds{PINGED}"));
        let (stream, _) = hybrid::connect(&path, ECHO, HANG).map_err(io::Error::other)?;
        stream.set_read_timeout(Some(HANG))?;
        Ok(Ping(stream))
    }

    /// Seconds until the answer.
    pub(super) fn ping(&mut self) -> io::Result<f64> {
        let began = now();
        self.0.write_all(b"p")?;
        self.0.read_exact(&mut [0])?;
        Ok(now() - began)
    }

    /// A failure of it, which an event explains or not.
    pub(super) fn failure(began: f64, error: &io::Error) -> Failure {
        let class = match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "hang",
            _ => "ended",
        };
        Failure {
            player: "ping".into(),
            peer: format!("guest{PINGED}"),
            class: class.into(),
            began,
            ended: now(),
            text: error.to_string(),
        }
    }
}

/// The counts of the two processes now, and of the connections when they were logged last.
pub(super) fn counts(supervisor: u32, shared: &Shared) -> Counts {
    let connections = shared.lock().connections;
    Counts::of(supervisor, worker(supervisor), connections)
}

fn write_file(dir: &Path, (tcp, udp): &(String, String), late: bool) -> io::Result<()> {
    let here = dir.display();
    let mut text = "vms:\n".to_owned();
    for cid in &GUESTS[..if late { 4 } else { 3 }] {
        text += &format!(
            "  - {{guest_cid: {cid}, socket: {here}/vm{cid}, uds_path: {here}/uds{cid}}}\n"
        );
    }
    text += &format!("attach: {{socket: {here}/attach}}\nforward:\n");
    text +=
        &format!("  - {{port: {TCP}, to: 'tcp:{tcp}'}}\n  - {{port: {UDP}, to: 'udp:{udp}'}}\n");
    if late {
        text += &format!("  - {{port: {LATE}, to: 'tcp:{tcp}'}}\n");
    }
    fs::write(dir.join("vms.yaml"), text)
}

/// The process below the supervisor. There are two for the moment of an upgrade: the younger one.
fn worker(supervisor: u32) -> Option<Pid> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let children = pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
        let mut fields = fields.split(' ');
        fields.next() != Some("Z") && fields.next() == Some(&supervisor.to_string())
    });
    Pid::from_raw(children.max()?)
}

/// Reads the log of `serve`.
fn follow_log(log: impl Read, mut copy: fs::File, shared: &Shared) {
    for line in BufReader::new(log).lines().map_while(Result::ok) {
        let _ = writeln!(copy, "{line}");
        let is = |what: &str| line.contains(what);
        // On a busy machine an upgrade may take longer than it may: then nothing has changed.
        let is_slow = is("takes too long") || is("not handed over: this process goes on");
        if is("SIGKILL): a successor takes over") {
            shared.add("killed", "");
        } else if is("panicked") || (!is_slow && (is(" ERROR ") || is("upgrade has failed"))) {
            shared.lock().faults.push(format!("serve: {line}"));
        }
        if is("has taken over") || is("upgrade has failed") {
            // The run goes on after a failure, too.
            shared.add("upgraded", "");
        } else if is("no upgrade: the worker process is starting") {
            shared.add("upgraded", "no upgrade");
        } else if is(" reloaded ") || is(" reloaded,") {
            shared.add("reloaded", "");
        } else if is(" INFO counters in_place") {
            let now = line
                .split_once("connections_now=")
                .and_then(|(_, rest)| rest.split(' ').next());
            shared.lock().connections = now.and_then(|now| now.parse().ok()).unwrap_or(0);
            shared.add("counters", "");
        }
    }
}
