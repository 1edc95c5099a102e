//! Starts the two worker processes of a measurement, synchronises them and collects their outcomes.
//!
//! # Invariants
//! - No worker outlives the pair.
//! - A worker that hangs or dies ends the measurement with a reason, not the program.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::peers::{Contestant, Program};
use crate::worker::order::{Job, Order, Outcome, Wait};

/// Time allowed beyond the measurement itself.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long one worker's output is awaited before that of the other one is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The cores that the two sides are pinned to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Cores {
    /// The side that sends or pings; `None` where there is only one core.
    pub(crate) sender: Option<usize>,
    pub(crate) receiver: Option<usize>,
    /// The program behind a device or relay: that of the sender unless a placement says otherwise.
    pub(crate) host: Option<usize>,
}

impl Cores {
    /// Whether sender and receiver have a core each.
    pub(crate) fn are_two(self) -> bool {
        self.sender.is_some() && self.sender != self.receiver
    }

    /// No side is pinned.
    pub(crate) const ANY: Cores = Cores {
        sender: None,
        receiver: None,
        host: None,
    };
}

/// One measurement.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Task {
    /// Job of the side that measures the time: Ping or Receive.
    pub(crate) timed: Job,
    pub(crate) wait: Wait,
    pub(crate) size: usize,
    pub(crate) warm: Duration,
    pub(crate) time: Duration,
    pub(crate) cores: Cores,
    /// Variant of the contestant, where it has several.
    pub(crate) how: Option<String>,
}

/// Measures `task` once.
///
/// # Errors
/// The fault that a worker reported, including received bytes that differ from those sent.
pub(crate) fn measure(contestant: Contestant, task: &Task) -> Result<Outcome, String> {
    let program = &contestant.program()?;
    if task.wait == Wait::Spin && !task.cores.are_two() {
        return Err("two spinning sides need two cores".to_owned());
    }
    if contestant.processes() == 1 {
        let place = MeasurementDir::new(task)?;
        let order = place.order(contestant, task, task.timed, None);
        let mut only = Worker::start(program, &order, place.deadline)?;
        only.expect_line("ready")?;
        only.send_go()?;
        return only.expect_line("result")?.parse();
    }
    let opened = open(contestant, task)?;
    let to = opened.address.clone();
    let mut sides = opened.connect(contestant, &to)?;
    sides.run().map(|[timed, _]| timed)
}

/// Starts the side that listens.
///
/// # Errors
/// The fault that it reported.
pub(crate) fn open(contestant: Contestant, task: &Task) -> Result<Opened<'_>, String> {
    let job = if task.timed.is_open() {
        task.timed
    } else {
        task.timed.other()
    };
    let place = MeasurementDir::new(task)?;
    let order = place.order(contestant, task, job, None);
    let mut open = Worker::start(&contestant.program()?, &order, place.deadline)?;
    let address = open.expect_line("open")?;
    Ok(Opened {
        open,
        address,
        task,
        place,
    })
}

/// The side that listens, without the other one.
pub(crate) struct Opened<'t> {
    open: Worker,
    /// Where it listens.
    pub(crate) address: String,
    task: &'t Task,
    place: MeasurementDir,
}

impl Opened<'_> {
    /// Starts the other side, which connects to `to`: the address of the first one, or that of a
    /// relay in front of it.
    ///
    /// # Errors
    /// The fault that one of them reported.
    pub(crate) fn connect(mut self, contestant: Contestant, to: &str) -> Result<Sides, String> {
        let is_open_timed = self.task.timed.is_open();
        let job = if is_open_timed {
            self.task.timed.other()
        } else {
            self.task.timed
        };
        let to = Some(to.to_owned());
        let order = self.place.order(contestant, self.task, job, to);
        let mut other = Worker::start(&contestant.program()?, &order, self.place.deadline)?;
        // The second worker's error may be why the first one never gets ready.
        other.expect_line("ready")?;
        self.open.expect_line("ready")?;
        let (timed, untimed) = if is_open_timed {
            (self.open, other)
        } else {
            (other, self.open)
        };
        Ok(Sides {
            timed,
            untimed,
            _dir: self.place,
        })
    }
}

/// Both sides of a measurement, connected.
pub(crate) struct Sides {
    timed: Worker,
    untimed: Worker,
    _dir: MeasurementDir,
}

impl Sides {
    /// Their processes.
    pub(crate) fn processes(&self) -> [u32; 2] {
        [self.timed.child.id(), self.untimed.child.id()]
    }

    /// Releases both sides and waits for their outcomes, that of the timed side first. Both keep
    /// their connection, and sleep, until they are dropped.
    ///
    /// # Errors
    /// The fault that one of them reported.
    pub(crate) fn run(&mut self) -> Result<[Outcome; 2], String> {
        let (timed, untimed) = (&mut self.timed, &mut self.untimed);
        timed.send_go()?;
        untimed.send_go()?;
        // Either may fail first, and the other would then wait for it forever.
        let (mut outcome, mut end) = (None, None);
        loop {
            if outcome.is_none() {
                outcome = timed.poll_line("result", POLL_INTERVAL)?;
            }
            if end.is_none() {
                end = untimed.poll_line("result", POLL_INTERVAL)?;
            }
            if let (Some(outcome), Some(end)) = (&outcome, &end) {
                return Ok([outcome.parse()?, end.parse()?]);
            }
        }
    }
}

impl Drop for Sides {
    fn drop(&mut self) {
        // In parallel: one worker may need the other in order to close its connection.
        drop((self.timed.input.take(), self.untimed.input.take()));
    }
}

/// The directory of a measurement, and when it must have ended.
struct MeasurementDir {
    dir: TempDir,
    deadline: Instant,
}

impl MeasurementDir {
    fn new(task: &Task) -> Result<MeasurementDir, String> {
        let dir = tempfile::tempdir().map_err(|error| format!("temporary directory: {error}"))?;
        Ok(MeasurementDir {
            dir,
            deadline: Instant::now() + task.warm + task.time + PATIENCE,
        })
    }

    fn order(&self, contestant: Contestant, task: &Task, job: Job, to: Option<String>) -> Order {
        let (cpu, other_cpu) = match job {
            Job::Send | Job::Ping => (task.cores.sender, task.cores.receiver),
            Job::Receive | Job::Pong => (task.cores.receiver, task.cores.sender),
        };
        Order {
            peer: contestant.name().to_owned(),
            job,
            wait: task.wait,
            size: task.size,
            warm: task.warm,
            time: task.time,
            cpu,
            other_cpu,
            place: self.dir.path().to_string_lossy().into_owned(),
            to,
            how: task.how.clone(),
        }
    }
}

/// A worker process; killed when dropped unless it has ended.
struct Worker {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    deadline: Instant,
}

impl Worker {
    fn start(program: &Program, order: &Order, deadline: Instant) -> Result<Worker, String> {
        let order = order.to_string();
        let mut child = Command::new(&program.path)
            .args(&program.before)
            .args(order.split(' '))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", program.path.display()))?;
        let (sender, lines) = channel();
        let output = child.stdout.take();
        // The thread ends with the worker's output, which ends with the worker.
        thread::spawn(move || {
            let lines = output.map(BufReader::new).into_iter();
            for line in lines.flat_map(BufRead::lines).map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Worker {
            name: program
                .path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            input: child.stdin.take(),
            child,
            lines,
            deadline,
        })
    }

    /// Waits for the next line, which must begin with `word`; returns the text after it.
    fn expect_line(&mut self, word: &str) -> Result<String, String> {
        loop {
            if let Some(rest) = self.poll_line(word, PATIENCE)? {
                return Ok(rest);
            }
        }
    }

    /// As [`expect_line`](Self::expect_line), but waits `time` at most; `None` after that.
    fn poll_line(&mut self, word: &str, time: Duration) -> Result<Option<String>, String> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let line = match self.lines.recv_timeout(left.min(time)) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) if left > time => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                return Err(format!("{}: no `{word}` in time", self.name));
            }
            Err(RecvTimeoutError::Disconnected) => {
                let how = match self.child.wait() {
                    Ok(status) => status.to_string(),
                    Err(error) => error.to_string(),
                };
                return Err(format!("{} ended before `{word}`: {how}", self.name));
            }
        };
        match line.split_once(' ').unwrap_or((&line, "")) {
            (first, rest) if first == word => Ok(Some(rest.to_owned())),
            ("fault", reason) => Err(reason.to_owned()),
            _ => Err(format!("{} printed {line:?}, not `{word}`", self.name)),
        }
    }

    /// Tells the worker to begin, with the line `go`.
    fn send_go(&mut self) -> Result<(), String> {
        let input = self.input.as_mut().ok_or("a worker without input")?;
        input
            .write_all(b"go\n")
            .map_err(|error| format!("{}: {error}", self.name))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The end of its standard input ends a healthy worker; otherwise kill it: it is our own
        // child.
        drop(self.input.take());
        let soon = Instant::now() + Duration::from_secs(2);
        while let Err(RecvTimeoutError::Timeout) | Ok(_) = self
            .lines
            .recv_timeout(soon.saturating_duration_since(Instant::now()))
        {
            if Instant::now() >= soon {
                let _ = self.child.kill();
                break;
            }
        }
        let _ = self.child.wait();
    }
}
