//! `--cpus LIST`: the kernel's notation for a set of CPUs, such as `0-3,5`.

use rustix::thread::{CpuSet, sched_getaffinity};

/// Why a list names no usable CPUs.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum CpusError {
    #[error("`{0}` is no CPU or range; give numbers and ranges joined by commas, such as 0-3,5")]
    Malformed(String),
    #[error("CPU {0} is named twice: leave one")]
    Twice(usize),
    #[error("this process may not run on CPU {cpu}; it may on {allowed}")]
    NotAllowed { cpu: usize, allowed: String },
}

/// The CPUs in the order of the list; this process may run on all of them.
pub(crate) fn parse(text: &str) -> Result<Vec<usize>, CpusError> {
    // If the affinity cannot be read, accept the list: pinning will report the error.
    match sched_getaffinity(None) {
        Ok(allowed) => parse_within(text, &allowed),
        Err(_) => parse_list(text),
    }
}

fn parse_within(text: &str, allowed: &CpuSet) -> Result<Vec<usize>, CpusError> {
    let cpus = parse_list(text)?;
    match cpus.iter().find(|&&cpu| !allowed.is_set(cpu)) {
        None => Ok(cpus),
        Some(&cpu) => {
            let allowed: Vec<String> = (0..CpuSet::MAX_CPU)
                .filter(|&cpu| allowed.is_set(cpu))
                .map(|cpu| cpu.to_string())
                .collect();
            Err(CpusError::NotAllowed {
                cpu,
                allowed: allowed.join(","),
            })
        }
    }
}

fn parse_list(text: &str) -> Result<Vec<usize>, CpusError> {
    let mut cpus = Vec::new();
    for item in text.split(',') {
        let malformed = || CpusError::Malformed(item.to_string());
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let first = parse_cpu(first).ok_or_else(malformed)?;
        let last = parse_cpu(last)
            .filter(|&last| last >= first)
            .ok_or_else(malformed)?;
        for cpu in first..=last {
            if cpus.contains(&cpu) {
                return Err(CpusError::Twice(cpu));
            }
            cpus.push(cpu);
        }
    }
    Ok(cpus)
}

fn parse_cpu(text: &str) -> Option<usize> {
    text.trim()
        .parse()
        .ok()
        .filter(|&cpu| cpu < CpuSet::MAX_CPU)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_ranges() {
        assert_eq!(parse_list("0"), Ok(vec![0]));
        assert_eq!(parse_list("4,0-2"), Ok(vec![4, 0, 1, 2]));
        assert_eq!(parse_list("3-3"), Ok(vec![3]));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            ",",
            "a",
            "1-",
            "-1",
            "2-1",
            "0,,1",
            "1024",
            "0-99999999999",
        ] {
            assert!(
                matches!(parse_list(text), Err(CpusError::Malformed(_))),
                "{text:?}"
            );
        }
        assert_eq!(parse_list("0-2,1"), Err(CpusError::Twice(1)));
    }

    #[test]
    fn a_cpu_we_may_not_use_is_refused_with_those_we_may() {
        let mut allowed = CpuSet::new();
        allowed.set(1);
        allowed.set(3);
        assert_eq!(parse_within("3,1", &allowed), Ok(vec![3, 1]));
        assert_eq!(
            parse_within("0-1", &allowed),
            Err(CpusError::NotAllowed {
                cpu: 0,
                allowed: "1,3".into()
            })
        );
    }
}
