//! A link: a guest with iperf3, its peer, and what lies between them.

use rustix::process::Signal;
use tempfile::TempDir;
use zerosock_cli::vm::children::Guarded;

use super::daemon::Daemon;
use super::guest::Vm;
use super::iperf::{self, Amount, Flow};
use crate::args::Settings;
use crate::processes;

/// Of a transfer.
const SECONDS: u32 = 2;
/// Bytes of a transfer, and pings, of a quick run.
const QUICK_BYTES: u64 = 256 << 10;
const QUICK_PINGS: usize = 3;
const PINGS: usize = 100;

/// See the [module](self). Dropping it ends all of its processes.
pub(super) struct Link {
    /// The guest with the client.
    pub(super) client: Vm,
    /// The guest with the server, if it is not on the host.
    pub(super) server: Option<Vm>,
    /// The server on the host.
    pub(super) _host_server: Option<Guarded>,
    pub(super) daemons: Vec<Daemon>,
    /// Address of the server.
    pub(super) to: String,
    pub(super) port: u16,
    pub(super) _dir: TempDir,
}

/// Result of a transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) mb_s: f64,
    /// CPU seconds outside the virtual processors for 10^9 bytes.
    pub(super) outside_s_per_gb: f64,
    /// Of the daemons alone; without one, the same as above.
    pub(super) back_end_s_per_gb: f64,
}

/// CPU seconds so far.
struct CpuSeconds {
    /// Of the daemons.
    daemons: f64,
    /// Of the VMMs' threads that are no virtual processors.
    vmms: f64,
}

impl Link {
    /// Transfers bytes; `reverse`: to the guest with the client.
    pub(super) fn transfer(&self, reverse: bool, settings: &Settings) -> Result<Transfer, String> {
        let amount = match settings.quick {
            true => Amount::Bytes(QUICK_BYTES),
            false => Amount::Seconds(SECONDS),
        };
        let client = iperf::client(&self.to, self.port, amount, reverse);
        self.running(|| {
            let before = self.cpu_seconds()?;
            // Bounded in the guest too: a client that hangs would keep the server busy.
            let said = self
                .client
                .shell(&format!("/bin/busybox timeout 30 {client}"))?;
            let flow = Flow::parse(&said)?;
            let after = self.cpu_seconds()?;
            let per_gb = |seconds: f64| seconds * 1e9 / flow.bytes;
            let daemons = after.daemons - before.daemons;
            let all = daemons + after.vmms - before.vmms;
            Ok(Transfer {
                mb_s: flow.bytes / 1e6 / flow.seconds,
                outside_s_per_gb: per_gb(all),
                back_end_s_per_gb: per_gb(if self.daemons.is_empty() {
                    all
                } else {
                    daemons
                }),
            })
        })
    }

    /// Median of round trips, microseconds.
    pub(super) fn ping(&self, settings: &Settings) -> Result<f64, String> {
        let count = if settings.quick { QUICK_PINGS } else { PINGS };
        self.running(|| self.client.ping(&self.to, count))
    }

    /// Runs with the polling daemons awake.
    fn running<T>(&self, run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        let pollers = || self.daemons.iter().filter(|daemon| daemon.polls);
        for daemon in pollers() {
            daemon.signal(Signal::CONT)?;
        }
        let result = run();
        for daemon in pollers() {
            daemon.signal(Signal::STOP)?;
        }
        result
    }

    /// Stops the polling daemons until something is measured.
    pub(super) fn rest(&self) -> Result<(), String> {
        self.running(|| Ok(()))
    }

    fn cpu_seconds(&self) -> Result<CpuSeconds, String> {
        let mut sum = CpuSeconds {
            daemons: 0.0,
            vmms: 0.0,
        };
        for daemon in &self.daemons {
            sum.daemons += processes::cpu_seconds(daemon.process.id())?;
        }
        for vm in std::iter::once(&self.client).chain(&self.server) {
            sum.vmms += vm.outside_seconds()?.unwrap_or(f64::NAN);
        }
        Ok(sum)
    }
}
