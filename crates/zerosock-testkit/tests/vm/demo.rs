//! `zerosock demo` streams a file through a stock guest and back, by the guest kernel's AF_VSOCK and from an endpoint on
//! pages of the guest, and reports both.

use std::process::{Command, Stdio};

use serde_json::Value;
use zerosock_cli::vm::accel::Choice;
use zerosock_cli::vm::pattern::Pattern;

use crate::lab::{Skipped, accel, short_dir, zerosock};
use crate::{Alone, kernels};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[(
    "a_file_passes_by_the_kernels_sockets_and_from_an_endpoint",
    both,
)];

const BYTES: usize = 2 << 20;

fn both() -> Result<(), Skipped> {
    let kernel = kernels::debian("6.12")?;
    let dir = short_dir();
    let file = dir.path().join("file");
    std::fs::write(&file, Pattern::bytes(7, BYTES)).expect("a file");
    let accel = match accel() {
        Choice::Auto => "auto",
        Choice::Kvm => "kvm",
        Choice::Tcg => "tcg",
    };
    let done = Command::new(zerosock())
        .args(["demo", "--json", "--accel", accel, "--file"])
        .arg(&file)
        .arg("--kernel")
        .arg(&kernel.image)
        .arg("--modules")
        .arg(&kernel.modules)
        .stdin(Stdio::null())
        .output()
        .expect("zerosock demo");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    let figures: Value = serde_json::from_slice(&done.stdout).expect("JSON");
    assert_eq!(figures["verified"], true, "{figures}");
    for metric in ["to_host_mb_s", "to_guest_mb_s", "rtt_us"] {
        for key in [metric.to_owned(), format!("endpoint_{metric}")] {
            let figure = figures[&key].as_f64();
            assert!(figure.is_some_and(|figure| figure > 0.0), "{figures}");
        }
    }
    Ok(())
}
