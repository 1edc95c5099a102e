//! The vsock devices of two VMs with hostile drivers and front-ends, and host programs.
//!
//! Nothing panics, each command is answered within a bounded number of turns, and no connection is left when both
//! front-ends have disconnected.
#![no_main]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::LazyLock;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock::fuzz::{Drive, vsock_worker};
use zerosock_fuzz::lab::Lab;
use zerosock_fuzz::number;
use zerosock_proto::vsock::datagram::{F_DGRAM, F_DGRAM_FLOW};
use zerosock_proto::vsock::features::F_SEQPACKET;
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr, WireOp, WireType};
use zerosock_proto::{Address, Cid, Port};
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::worker::Worker;

static PROGRAMS: LazyLock<(PathBuf, UnixListener)> = LazyLock::new(|| {
    let dir = std::env::temp_dir().join(format!("zerosock-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("vm3_1");
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(path).unwrap();
    listener.set_nonblocking(true).unwrap();
    (dir, listener)
});

fn packet(guest: usize, u: &mut Unstructured<'_>) -> Result<Repr> {
    let port = u.arbitrary::<u8>()?;
    let cid = 3 + guest as u32;
    let to = [2, 2, 2, 7 - cid, 9][u.choose_index(5)?];
    Ok(Repr {
        src: Address::new(Cid::new(cid), Port::new(u32::from(port & 3) + 1)),
        dst: Address::new(Cid::new(to), Port::new(u32::from(port >> 2 & 3) + 1)),
        len: [0, 0, 10, 300, 5000][u.choose_index(5)?],
        socket_type: WireType::from([1, 1, 1, 2, 3, 7][u.choose_index(6)?]),
        op: WireOp::from(match u.arbitrary::<u8>()? {
            255 => u.arbitrary()?,
            op => [1, 1, 2, 3, 4, 5, 5, 5, 6, 7, 0x7a20, 0x7a21][usize::from(op) % 12],
        }),
        flags: u.int_in_range(0..=3)?,
        buf_alloc: if u.arbitrary()? { 65536 } else { number(u)? },
        fwd_cnt: if u.arbitrary()? { 0 } else { number(u)? },
    })
}

/// The host programs that have accepted a connection.
fn program(programs: &mut Vec<UnixStream>, u: &mut Unstructured<'_>) -> Result<()> {
    let choice = u.int_in_range(0..=3u8)?;
    if choice < 2 {
        programs.extend(PROGRAMS.1.accept().map(|(stream, _)| stream));
        return Ok(());
    }
    let Some(mut program) = programs.pop() else {
        return Ok(());
    };
    if choice == 3 {
        program.set_nonblocking(true).unwrap();
        let len = [1, 5000, 100_000][u.choose_index(3)?];
        // It may have ended, or have no room or no bytes.
        let _ = match u.arbitrary()? {
            true => program.write(&vec![3; len]),
            false => program.read(&mut vec![0; len]),
        };
        programs.push(program);
    }
    Ok(())
}

fn step<D: WorkerDevice>(
    lab: &mut Lab<D>,
    programs: &mut Vec<UnixStream>,
    u: &mut Unstructured<'_>,
) -> Result<()> {
    match u.int_in_range(0..=7u8)? {
        0..=2 => {
            let guest = usize::from(u.ratio(1, 4)?);
            let header = packet(guest, u)?;
            let mut bytes = [0; HEADER_LEN];
            header.emit(&mut bytes);
            // Sometimes with too few bytes, or with more.
            let more = [header.len, header.len, header.len, 0, 70_000][u.choose_index(5)?];
            let split = [0, HEADER_LEN, 20][u.choose_index(3)?];
            lab.send(guest, 1, &bytes, more, split);
        }
        3 => program(programs, u)?,
        _ => lab.step(u)?,
    }
    Ok(())
}

struct Target<'a>(Unstructured<'a>);

impl Drive for Target<'_> {
    fn drive<D: WorkerDevice>(self, worker: Worker<D>) -> Worker<D> {
        let mut u = self.0;
        let features =
            F_SEQPACKET | u64::from(u.arbitrary::<u8>().unwrap_or_default()) << 15 & F_DGRAM_FLOW;
        let mut lab = Lab::new(
            worker,
            if u.len() % 2 == 0 {
                features | F_DGRAM
            } else {
                features
            },
        );
        let mut programs = Vec::new();
        for _ in 0..64 {
            if step(&mut lab, &mut programs, &mut u).is_err() || u.is_empty() {
                break;
            }
        }
        lab.end();
        lab.worker
    }
}

fuzz_target!(|bytes: &[u8]| {
    vsock_worker(&PROGRAMS.0, Target(Unstructured::new(bytes)));
    while PROGRAMS.1.accept().is_ok() {}
});
