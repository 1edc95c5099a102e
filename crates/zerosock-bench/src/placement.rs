//! Where the processes of a measurement run.

use std::fmt;
use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity};

use crate::pair::Cores;

/// The cores of a device or relay, of its driver or connecting program, and of the program on the host.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Placement {
    pub(crate) device: usize,
    pub(crate) driver: usize,
    pub(crate) host: usize,
}

impl Placement {
    /// The device with a core of its own, with its driver, and with the program on the host; the others share
    /// the other core.
    pub(crate) fn all() -> Vec<Placement> {
        let mut cores = allowed();
        let first = cores.next().unwrap_or(0);
        let Some(second) = cores.next() else {
            return vec![Placement::new([first; 3])];
        };
        let placed = [
            [first, second, second],
            [first, first, second],
            [first, second, first],
        ];
        placed.map(Placement::new).into()
    }

    fn new([device, driver, host]: [usize; 3]) -> Placement {
        Placement {
            device,
            driver,
            host,
        }
    }

    pub(crate) fn cores(self) -> Cores {
        Cores {
            sender: Some(self.driver),
            receiver: Some(self.device),
            host: Some(self.host),
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.device, self.driver, self.host)
    }
}

impl FromStr for Placement {
    type Err = String;

    fn from_str(text: &str) -> Result<Placement, String> {
        let cores = text
            .split('/')
            .map(str::parse)
            .collect::<Result<Vec<_>, _>>();
        let cores = cores.ok().and_then(|cores| cores.try_into().ok());
        let placement = cores.map(Placement::new).ok_or(
            "give the cores of the device, of the driver and of the program on the host, such as 0/1/1, or `all`",
        )?;
        for core in [placement.device, placement.driver, placement.host] {
            if !allowed().any(|allowed| allowed == core) {
                return Err(format!("this process may not run on core {core}"));
            }
        }
        Ok(placement)
    }
}

/// The cores in this process's affinity mask.
pub(crate) fn allowed() -> impl Iterator<Item = usize> {
    let set = sched_getaffinity(None).unwrap_or_default();
    (0..CpuSet::MAX_CPU).filter(move |cpu| set.is_set(*cpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placement_names_three_cores_that_this_process_may_use() {
        for placement in Placement::all() {
            assert_eq!(placement.to_string().parse(), Ok(placement));
        }
        for wrong in ["", "0", "0/0", "0/0/0/0", "a/0/0", "0/0/100000"] {
            assert!(wrong.parse::<Placement>().is_err(), "{wrong}");
        }
    }
}
