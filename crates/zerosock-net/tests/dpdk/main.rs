//! A foreign driver: virtio_user of DPDK on a port of the switch, and an interface on another. Needs the
//! packages `libdpdk-dev` and `pkg-config`, and a C compiler; no huge pages and no privileges.

#[path = "../interface/lan.rs"]
#[expect(dead_code, reason = "others use more of it")]
mod lan;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use zerosock_net::interface::{InterfaceConfig, LoanError, Repr};

use lan::{DEADLINE, Lan, mac};

const FRAMES: u64 = 10_000;
/// The test in this file.
const NAME: &str = "frames_of_dpdk_come_back_unchanged";

/// Compiles the program of DPDK.
fn compile(dir: &Path) -> Result<PathBuf, String> {
    let flags = Command::new("pkg-config")
        .args(["--cflags", "--libs", "libdpdk"])
        .output()
        .map_err(|error| format!("install pkg-config: {error}"))?;
    if !flags.status.success() {
        return Err("install the package libdpdk-dev".into());
    }
    let flags = String::from_utf8(flags.stdout).map_err(|error| error.to_string())?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dpdk/virtio_user.c");
    let program = dir.join("virtio_user");
    let mut compiler = Command::new("cc");
    compiler.arg("-O2").arg("-Wall").arg("-o").arg(&program);
    compiler.arg(source).args(flags.split_whitespace());
    match compiler.output() {
        Err(error) => Err(format!("install a C compiler: {error}")),
        Ok(output) if output.status.success() => Ok(program),
        Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
    }
}

#[test]
fn frames_of_dpdk_come_back_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let program = match compile(dir.path()) {
        Ok(program) => program,
        Err(reason) => {
            println!("SKIPPED {NAME}: {reason}");
            return;
        }
    };
    for options in ["", ",mrg_rxbuf=0", ",in_order=0,queue_size=512"] {
        exchange(&program, dir.path(), options);
    }
}

/// Lets the program send frames with these options of its driver, and returns them.
fn exchange(program: &Path, dir: &Path, options: &str) {
    // DPDK's memory cannot be sealed.
    let lan = Lan::with_memory(&[None; 2], false);
    let interface = lan.connect(1, &InterfaceConfig::default());
    let device = format!(
        "net_virtio_user0,path={},queues=1,mac={}{options}",
        lan.sockets[0].display(),
        mac(0)
    );
    let mut child = Command::new(program)
        .args(["--no-huge", "-m", "256", "--no-pci", "--no-telemetry"])
        .args(["--no-shconf", "--file-prefix"])
        .arg(format!("zerosock{}", std::process::id()))
        .args(["--vdev", &device, "--", &FRAMES.to_string()])
        // The files of DPDK at run time.
        .env("XDG_RUNTIME_DIR", dir)
        .env("RUNTIME_DIRECTORY", dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + DEADLINE + DEADLINE;
    let mut returned = 0;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            let _ = child.kill();
        }
        let soon = Instant::now() + Duration::from_millis(20);
        interface.wait(Some(soon)).unwrap();
        while let Some(frame) = interface.recv() {
            let mut bytes = frame.to_vec();
            drop(frame);
            if bytes[12..14] != [0x88, 0xb5] {
                continue;
            }
            bytes.copy_within(6..12, 0);
            bytes[6..12].copy_from_slice(&mac(1).0);
            let mut loan = loop {
                match interface.loan(bytes.len()) {
                    Ok(loan) => break loan,
                    Err(LoanError::Full) => {
                        interface.wait(Some(end)).unwrap();
                    }
                    Err(error) => panic!("{error}"),
                }
            };
            loan.write(0, &bytes);
            loan.queue(&Repr::PLAIN).unwrap();
            returned += 1;
        }
        interface.flush();
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{options}: {returned} returned; {:?}\n{text}\n{errors}",
        lan.server().stats()
    );
    assert!(text.contains("10000 frames came back"), "{text}");
    assert_eq!(returned, FRAMES);
}
