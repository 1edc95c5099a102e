//! The log of connections that a former process has left: any contents are a log, each entry is stale or free, and no
//! entry is given twice.
#![no_main]

use std::os::fd::AsFd;
use std::sync::LazyLock;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock::fuzz::{TABLE, flow_table};
use zerosock_fuzz::{memory_file, steps};

static FILE: LazyLock<std::fs::File> = LazyLock::new(|| memory_file(TABLE as u64).into());

fn word(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.arbitrary::<u8>()? {
        value @ 0..=63 => value.into(),
        64..=127 => u64::from(u.arbitrary::<u32>()?) << 32 | 1,
        128..=191 => u64::from(u.arbitrary::<u32>()?) << 32 | 2,
        _ => u.arbitrary()?,
    })
}

fuzz_target!(|bytes: &[u8]| {
    let words = steps(&mut Unstructured::new(bytes), word);
    let mut table: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    table.resize(TABLE, 0);
    std::os::unix::fs::FileExt::write_all_at(&*FILE, &table, 0).unwrap();
    flow_table(FILE.as_fd());
});
