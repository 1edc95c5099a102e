//! virtio-net headers, control commands, and frames that the switch cuts for a receiver without offloads.
//!
//! A header that is accepted lies inside its frame and was negotiated. What a receiver gets was announced, is accepted
//! by it, has the payload of the frame, and right checksums.
#![no_main]

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock_fuzz::round_trip;
use zerosock_net::switch::fuzz;
use zerosock_proto::wire::net::{
    Checksum, Command, Config, GSO_TCPV4, GSO_TCPV6, HEADER_LEN, Header, Mac, NEEDS_CSUM, Offloads,
    Repr,
};

/// A TSO frame, perhaps with a few bytes changed.
fn segmented(u: &mut Unstructured<'_>) -> Result<(Header, Vec<u8>)> {
    let v4: bool = u.arbitrary()?;
    let tags = usize::from(u.int_in_range(0..=2u8)?) * 4;
    let ip = 14 + tags;
    let start = ip + if v4 { 20 } else { 40 };
    let payload = usize::from(u.int_in_range(0..=4000u16)?);
    let mut frame: Vec<u8> = (0..start + 20 + payload).map(|at| at as u8).collect();
    for at in (12..ip).step_by(4) {
        frame[at..at + 2].copy_from_slice(&[0x81, 0]);
    }
    frame[ip - 2..ip].copy_from_slice(if v4 { &[8, 0] } else { &[0x86, 0xdd] });
    frame[ip] = if v4 { 0x45 } else { 0x60 };
    frame[ip + if v4 { 9 } else { 6 }] = 6;
    frame[start + 12] = 5 << 4;
    let mut header = Header::default();
    header.set_flags(NEEDS_CSUM);
    header.set_gso_type(if v4 { GSO_TCPV4 } else { GSO_TCPV6 });
    header.set_gso_size(u.int_in_range(1..=1500)?);
    header.set_hdr_len((start + 20) as u16);
    header.set_csum_start(start as u16);
    header.set_csum_offset(16);
    for _ in 0..u.int_in_range(0..=3u8)? {
        let at = u.choose_index(HEADER_LEN + 80)?;
        let byte = u.arbitrary()?;
        match header.0.get_mut(at) {
            Some(place) => *place = byte,
            None => {
                let at = (at - HEADER_LEN) % frame.len();
                frame[at] = byte;
            }
        }
    }
    Ok((header, frame))
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let [csum, tso4, tso6, ecn] = u.arbitrary()?;
    let offloads = Offloads {
        csum,
        tso4,
        tso6,
        ecn,
    };
    let (header, frame) = match u.arbitrary()? {
        true => segmented(u)?,
        false => (Header(u.arbitrary()?), u.bytes(u.len())?.to_vec()),
    };
    let (first, last) = header.to_words();
    assert_eq!(Header::from_words(first, last), header);
    if let Ok(repr) = Repr::parse(&header, frame.len(), offloads) {
        if let Checksum::Partial { start, offset } = repr.checksum {
            assert!(
                usize::from(start) >= 14
                    && usize::from(start) + usize::from(offset) + 2 <= frame.len()
            );
            assert!(offloads.csum);
        }
        assert!(
            repr.gso
                .is_none_or(|gso| gso.size > 0 && usize::from(gso.hdr_len) <= frame.len())
        );
        assert!(repr.gso.is_none() || offloads.tso4 || offloads.tso6);
        assert_eq!(Repr::parse(&repr.emit(), frame.len(), offloads), Ok(repr));
        assert_eq!(
            Repr::parse(&repr.emit(), frame.len(), Offloads::ALL),
            Ok(repr)
        );
    }
    fuzz::frame(header, &frame, offloads);
    let head = &frame[..frame.len().min(4)];
    if let Some(Command::QueuePairs(pairs)) = Command::parse(head, frame.len()) {
        assert!(pairs > 0);
    }
    if let Some(bytes) = frame.first_chunk::<{ Config::LEN }>() {
        let config = Config::parse(bytes);
        assert_eq!(Config::parse(&config.emit()), config);
    }
    if let Ok(text) = std::str::from_utf8(&frame) {
        round_trip::<Mac>(text);
    }
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    // Too few bytes are no input.
    let _ = run(&mut Unstructured::new(bytes));
});
