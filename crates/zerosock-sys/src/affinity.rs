//! Pinning threads to processors.

use std::io;

use rustix::thread::{CpuSet, sched_setaffinity};

/// Lets the calling thread run on processor `cpu` only.
///
/// # Errors
/// `InvalidInput` when there is no such processor, or this process may not use it.
pub fn pin_current_thread(cpu: usize) -> io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("processor {cpu}: numbers go up to {}", CpuSet::MAX_CPU - 1),
        ));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::sched_getaffinity;

    #[test]
    fn pins_to_a_processor_we_may_use() {
        std::thread::spawn(|| {
            let all = sched_getaffinity(None).unwrap();
            let cpu = (0..CpuSet::MAX_CPU)
                .rev()
                .find(|&cpu| all.is_set(cpu))
                .unwrap();
            pin_current_thread(cpu).unwrap();
            let now = sched_getaffinity(None).unwrap();
            assert!(now.is_set(cpu));
            assert_eq!(now.count(), 1);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn refuses_a_processor_that_does_not_exist() {
        for cpu in [CpuSet::MAX_CPU - 1, CpuSet::MAX_CPU, usize::MAX] {
            let error = pin_current_thread(cpu).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{cpu}");
        }
    }
}
