//! Accelerators of guests: KVM or software.
//!
//! An open `/dev/kvm` proves little: on some machines KVM runs no stock guest (QEMU aborts, or the
//! guest hangs before its first instruction). So KVM counts as working only after a guest has
//! printed something under it, and a failure is remembered for the process.

use std::fmt;
use std::fs::OpenOptions;
use std::sync::Mutex;

use clap::ValueEnum;

/// How guest instructions are executed.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Accel {
    /// The processor runs them.
    Kvm,
    /// QEMU translates them.
    Tcg,
}

impl Accel {
    /// The options of QEMU for it.
    pub fn options(self) -> &'static [&'static str] {
        match self {
            Accel::Kvm => &["-accel", "kvm", "-cpu", "host"],
            // QEMU translates slowly the instructions by which the kernel copies otherwise.
            Accel::Tcg => &["-accel", "tcg,thread=multi", "-cpu", "max,-erms,-fsrm"],
        }
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        })
    }
}

/// Which accelerators a boot may use.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default, ValueEnum)]
pub enum Choice {
    /// KVM where it works, else software
    #[default]
    Auto,
    /// Only KVM
    Kvm,
    /// Only software
    Tcg,
}

static KVM_FAILED: Mutex<Option<String>> = Mutex::new(None);

/// The accelerators to try, in order.
pub fn candidates(choice: Choice) -> Vec<Accel> {
    match choice {
        Choice::Kvm => vec![Accel::Kvm],
        Choice::Auto if kvm_failure().is_none() && kvm_opens() => vec![Accel::Kvm, Accel::Tcg],
        Choice::Auto | Choice::Tcg => vec![Accel::Tcg],
    }
}

/// Why KVM is not used any more in this process, if a guest failed under it.
pub fn kvm_failure() -> Option<String> {
    KVM_FAILED.lock().ok().and_then(|reason| reason.clone())
}

/// Records for the rest of the process that KVM runs no guest here.
pub fn remember_kvm_failure(reason: &str) {
    if let Ok(mut slot) = KVM_FAILED.lock() {
        slot.get_or_insert_with(|| reason.to_owned());
    }
}

fn kvm_opens() -> bool {
    match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) => {
            remember_kvm_failure(&format!("/dev/kvm: {error}"));
            false
        }
    }
}
