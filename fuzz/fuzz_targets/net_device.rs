//! The network devices of two guests with hostile drivers and front-ends, on a switch.
//!
//! Nothing panics, and each command is answered within a bounded number of turns.
#![no_main]

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock_fuzz::lab::Lab;
use zerosock_net::model::ALL_OFFLOADS;
use zerosock_net::switch::fuzz::switch_worker;
use zerosock_proto::wire::net::{F_CTRL_VQ, F_MRG_RXBUF, GSO_TCPV4, Header, Mac, NEEDS_CSUM};

const MACS: [Mac; 2] = [Mac([0x52, 0x54, 0, 0, 0, 1]), Mac([0x52, 0x54, 0, 0, 0, 2])];

/// A header and a frame, valid or nearly so.
fn frame(guest: usize, u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut header = Header::default();
    if u.arbitrary()? {
        header.set_flags(NEEDS_CSUM);
        header.set_csum_start(34);
        header.set_csum_offset(16);
    }
    if u.arbitrary()? {
        header.set_gso_type(GSO_TCPV4);
        header.set_gso_size(u.int_in_range(1..=600)?);
        header.set_hdr_len(54);
    }
    let mut bytes = header.0.to_vec();
    bytes.extend(match u.int_in_range(0..=3u8)? {
        0 => [0xff; 6],
        1 => u.arbitrary()?,
        _ => MACS[1 - guest].0,
    });
    bytes.extend(if u.ratio(1, 8)? {
        u.arbitrary()?
    } else {
        MACS[guest].0
    });
    bytes.extend([8, 0, 0x45, 0]);
    bytes.resize(12 + 14 + 20 + 20, 6);
    bytes[12 + 14 + 20 + 12] = 5 << 4;
    if u.ratio(1, 4)? {
        let at = u.choose_index(bytes.len())?;
        bytes[at] = u.arbitrary()?;
    }
    if u.ratio(1, 8)? {
        bytes.truncate(u.choose_index(bytes.len())? + 1);
    }
    Ok(bytes)
}

fn step(
    lab: &mut Lab<impl zerosock_virtio::device::WorkerDevice>,
    u: &mut Unstructured<'_>,
) -> Result<bool> {
    match u.int_in_range(0..=3u8)? {
        0 | 1 => {
            let guest = usize::from(u.arbitrary::<bool>()?);
            let bytes = frame(guest, u)?;
            let more = [0, 100, 2000, 4000, 70_000][u.choose_index(5)?];
            let split = [0, 12, 26, 5][u.choose_index(4)?];
            lab.send(guest, 1, &bytes, more, split);
        }
        2 if u.ratio(1, 4)? => lab.send(0, 2, u.bytes(4)?, 1, 4),
        _ => lab.step(u)?,
    }
    Ok(u.is_empty())
}

fuzz_target!(|bytes: &[u8]| {
    let mut u = Unstructured::new(bytes);
    let Ok((offloads, merged)) = u.arbitrary::<(u16, bool)>() else {
        return;
    };
    let features =
        ALL_OFFLOADS & u64::from(offloads) | F_CTRL_VQ | if merged { F_MRG_RXBUF } else { 0 };
    let mut lab = Lab::new(switch_worker(MACS), features);
    for _ in 0..64 {
        if !matches!(step(&mut lab, &mut u), Ok(false)) {
            break;
        }
    }
    lab.end();
});
