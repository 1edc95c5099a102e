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
#[path = "cpus_tests.rs"]
mod tests;
