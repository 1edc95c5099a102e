//! Requests of an agent in a guest, with valid tags, and answers of a daemon, which arrive in parts.
//!
//! No request is decoded before all of it has arrived, an early refusal is the one of the whole request, and what is
//! accepted is encoded such that the same is decoded.
#![no_main]

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock::fuzz::{guest_answers, guest_requests};
use zerosock_fuzz::steps;

fn request(u: &mut Unstructured<'_>) -> Result<(u16, u32, Vec<u8>)> {
    let operation = match u.arbitrary::<u8>()? {
        255 => u.arbitrary()?,
        other => u16::from(other % 5),
    };
    let mut body = match operation {
        2 => u.bytes(40)?.to_vec(),
        4 => u.bytes(16)?.to_vec(),
        1 => {
            // With the endpoint and the extents that its fields announce.
            let (ports, extents) = (u.int_in_range(0..=3u8)?, u.int_in_range(0..=4u8)?);
            let mut body = u.bytes(16)?.to_vec();
            body.extend((88 + 4 * u16::from(ports)).to_le_bytes());
            body.extend([extents, 0, 0, 0, 0, 0]);
            body.extend(b"zsat\x01\0\x02\0\x01\0\0\0");
            body.extend([u.arbitrary()?, 0, 0, 0, 0, 0, ports, 0, 0, 0, 0, 0]);
            body.resize(body.len() + 64, 0);
            body.extend(u.bytes(4 * usize::from(ports))?);
            body.extend(u.bytes(16 * usize::from(extents))?);
            body
        }
        _ => u.arbitrary()?,
    };
    if u.ratio(1, 8)? && !body.is_empty() {
        let at = u.choose_index(body.len())?;
        body[at] = u.arbitrary()?;
    }
    let len = body.len() as u32;
    Ok((
        operation,
        if u.ratio(1, 16)? { u.arbitrary()? } else { len },
        body,
    ))
}

fuzz_target!(|bytes: &[u8]| {
    guest_answers(bytes);
    guest_answers(&[&b"zsge\x01\0\0\0"[..], bytes].concat());
    let mut u = Unstructured::new(bytes);
    let part = usize::from(u.arbitrary::<u16>().unwrap_or_default() % 200);
    let requests = steps(&mut u, request);
    let requests: Vec<_> = requests
        .iter()
        .map(|(op, len, body)| (*op, *len, &body[..]))
        .collect();
    guest_requests(&requests, part);
});
