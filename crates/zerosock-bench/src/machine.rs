//! The machine that figures come from, in one line, and the two cores that are used.

use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::pair::Cores;
use crate::placement::{Placement, allowed};

/// The first two cores in this process's affinity mask.
pub(crate) fn cores() -> Cores {
    let mut allowed = allowed();
    match (allowed.next(), allowed.next()) {
        (Some(sender), Some(receiver)) => Cores {
            sender: Some(sender),
            receiver: Some(receiver),
            host: Some(sender),
        },
        _ => Cores::ANY,
    }
}

/// Raises the limit of descriptors for this process and its children: to the hard limit, and that
/// to `wanted` if it is lower and this process may. Returns the limit.
pub(crate) fn raise_descriptors(wanted: u64) -> usize {
    let limit = getrlimit(Resource::Nofile);
    let set = |maximum| {
        let limit = Rlimit {
            current: maximum,
            maximum,
        };
        setrlimit(Resource::Nofile, limit).ok().map(|()| maximum)
    };
    let above = limit.maximum.filter(|maximum| *maximum < wanted);
    let now = above.and_then(|_| set(Some(wanted)));
    let now = now.or_else(|| set(limit.maximum)).unwrap_or(limit.current);
    now.map_or(usize::MAX, |now| usize::try_from(now).unwrap_or(usize::MAX))
}

/// Processor, cores, memory, kernel, and the cores of each side.
pub(crate) fn describe(cores: Cores, placement: Option<Placement>) -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = field(&cpuinfo, "model name").unwrap_or("an unnamed processor");
    let memory = read("/proc/meminfo");
    let gib = field(&memory, "MemTotal")
        .and_then(|total| total.split_whitespace().next())
        .and_then(|kib| kib.parse::<u64>().ok())
        .map_or(0, |kib| kib.div_ceil(1 << 20));
    let kernel = read("/proc/sys/kernel/osrelease");
    let pinned = match (placement, cores) {
        (Some(at), _) => format!(
            "device on core {}, driver on core {}, host on core {}",
            at.device, at.driver, at.host
        ),
        (
            None,
            Cores {
                sender: Some(sender),
                receiver: Some(receiver),
                ..
            },
        ) => format!("sender on core {sender}, receiver on core {receiver}"),
        _ => "only one core for both sides".to_owned(),
    };
    format!(
        "{model}, {} cores, {gib} GiB, Linux {}; {pinned}",
        allowed().count(),
        kernel.trim()
    )
}

/// The value after `NAME:` in the files of /proc.
fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_with_one_core_is_reported_as_such() {
        assert!(describe(Cores::ANY, None).contains("only one core"));
    }

    #[test]
    fn fields_are_found_by_their_name() {
        let text = "a : 1\nmodel name\t: Some CPU\n";
        assert_eq!(field(text, "model name"), Some("Some CPU"));
        assert_eq!(field(text, "model"), None);
    }
}
