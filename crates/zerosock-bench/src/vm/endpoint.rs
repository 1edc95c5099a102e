//! What guest endpoints need in the guest: huge pages and the agent; and the CPU time of the guest.

use zerosock_testkit::protocol::Command;

use super::{Figures, KEY, SOCKET, STEP, Vm, driving};
use crate::report::line;
use crate::worker::touch::Fault;

/// Memory of an endpoint, of huge pages.
const MEMORY_MIB: u32 = 64;
/// Hundredths of a second, as /proc/stat has them, in nanoseconds.
const TICK: f64 = 1e7;

impl Vm {
    /// Makes huge pages in the guest, and starts the agent.
    pub(super) fn start_agent(&self) -> Result<(), Fault> {
        self.shell(&format!(
            "echo {} > /proc/sys/vm/nr_hugepages; printf %s {KEY} > /key; chmod 600 /key",
            MEMORY_MIB / 2
        ))?;
        let agent = format!("/bin/zerosock guest --key /key --memory {MEMORY_MIB}M");
        let argv = agent.split(' ').map(str::to_owned).collect();
        let start = Command::Start { argv };
        let started = driving(&self.host, || self.guest.remote.run(start, STEP));
        started.map_err(line)?;
        // Half a minute: a busy machine emulates the guest slowly.
        let wait =
            "i=0; until test -S SOCKET; do i=$((i+1)); test $i -lt 300 || exit 1; sleep 0.1; done";
        self.shell(&wait.replace("SOCKET", SOCKET)).map(drop)
    }

    /// Adds the CPU time of the guest for each piece to the figures of a measurement, if it has an agent.
    pub(super) fn with_cpu(
        &self,
        run: impl FnOnce() -> Result<Figures, Fault>,
    ) -> Result<Figures, Fault> {
        let before = self.busy_ticks()?;
        let mut figures = run()?;
        let ticks = self.busy_ticks()?.saturating_sub(before);
        let outcome = &figures.outcome;
        let pieces = outcome.total.unwrap_or(outcome.messages).max(1);
        figures.guest_cpu = Some(ticks as f64 * TICK / pieces as f64);
        Ok(figures)
    }

    /// Hundredths of a second in which the guest's processor was not idle.
    fn busy_ticks(&self) -> Result<u64, Fault> {
        let stat = self.shell("grep '^cpu ' /proc/stat")?;
        let ticks: Vec<u64> = stat
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        match ticks[..] {
            [user, nice, system, _idle, _iowait, irq, softirq, ..] => {
                Ok(user + nice + system + irq + softirq)
            }
            _ => Err(format!("in the guest: {}", line(&stat))),
        }
    }

    /// Runs a command of the guest's shell, and returns what it prints.
    fn shell(&self, script: &str) -> Result<String, Fault> {
        let argv = ["/bin/busybox", "sh", "-c", script].map(str::to_owned);
        let run = Command::Run { argv: argv.into() };
        let done = driving(&self.host, || self.guest.remote.run(run, STEP));
        let done = done.map_err(line)?;
        let text = done.text.unwrap_or_default();
        match done.bytes {
            0 => Ok(text),
            status => Err(format!("in the guest: {script}: status {status}: {text}")),
        }
    }
}
