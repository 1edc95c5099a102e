//! The access log: one line for each connection at its end, within a rate.

use std::fmt;

use zerosock_proto::Instant;

use super::{RelayDevice, name};
use crate::relay::associations::SenderAssociation;
use crate::relay::pair::{Origin, Pair, Reason};
use crate::relay::plan::RelayPlan;
use crate::relay::way::Mode;

/// `Some` if a line may be written, with the number of those that were suppressed before it, if any.
fn admit_line(plan: &RelayPlan) -> Option<Option<u64>> {
    match tracing::enabled!(tracing::Level::INFO) {
        true => plan.lines.admit(std::time::Instant::now()),
        false => None,
    }
}

/// Logs the end of an association.
pub(super) fn log_association(
    plan: &RelayPlan,
    association: &SenderAssociation,
    now: Instant,
    reason: &dyn fmt::Display,
) {
    let Some(suppressed) = admit_line(plan) else {
        return;
    };
    let [to_target, to_source] = association.bytes;
    tracing::info!(
        source = %association.source,
        target = %name(plan, 1),
        to_target,
        to_source,
        dropped = association.dropped,
        seconds = now.saturating_duration_since(association.opened).as_secs_f64(),
        way = if association.is_joined() { "sockmap" } else { "messages" },
        %reason,
        suppressed,
        "association ended"
    );
}

impl RelayDevice {
    /// Logs the end of a pair.
    pub(super) fn log_end(&self, pair: &Pair, reason: Reason, now: Instant) {
        let Some(suppressed) = admit_line(&self.plan) else {
            return;
        };
        let [to_target, to_source] = pair.bytes();
        let seconds = now.saturating_duration_since(pair.opened).as_secs_f64();
        let [there, back] = pair.modes();
        tracing::info!(
            source = %From(pair.source, name(&self.plan, 0)),
            target = %To(pair, name(&self.plan, 1)),
            to_target,
            to_source,
            dropped = pair.dropped(),
            seconds,
            way = %Ways(there, back, pair.is_joined()),
            reason = %Why(reason),
            suppressed,
            "connection ended"
        );
    }

    /// Logs a connection whose target cannot be reached.
    pub(super) fn unreachable_end(&self, source: Origin, end: usize, reason: &dyn fmt::Display) {
        let Some(suppressed) = admit_line(&self.plan) else {
            return;
        };
        tracing::info!(
            source = %From(source, name(&self.plan, 0)),
            target = %name(&self.plan, end),
            %reason,
            suppressed,
            "cannot connect"
        );
    }
}

struct From<'a>(Origin, &'a dyn fmt::Display);

impl fmt::Display for From<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Origin::Ip(address) => write!(f, "{address}"),
            Origin::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
            Origin::Unix | Origin::Here => self.1.fmt(f),
        }
    }
}

struct To<'a>(&'a Pair, &'a dyn fmt::Display);

impl fmt::Display for To<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.1.fmt(f)?;
        match self.0.target {
            Some(address) => write!(f, " ({address})"),
            None => Ok(()),
        }
    }
}

/// The ways of both directions, and whether the kernel joins the sockets.
struct Ways(Mode, Mode, bool);

impl fmt::Display for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |mode| match mode {
            Mode::Splice | Mode::Adaptive => "splice",
            Mode::Copy => "copy",
            Mode::Messages => "messages",
        };
        match self.0 == self.1 {
            _ if self.2 => f.write_str("sockmap"),
            true => f.write_str(name(self.0)),
            false => write!(f, "{}/{}", name(self.0), name(self.1)),
        }
    }
}

struct Why(Reason);

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Reason::Closed => f.write_str("closed"),
            Reason::Failed(0, errno) => write!(f, "source: {errno}"),
            Reason::Failed(_, errno) => write!(f, "target: {errno}"),
            Reason::Idle => f.write_str("idle"),
            Reason::Stopped => f.write_str("stopped"),
        }
    }
}
