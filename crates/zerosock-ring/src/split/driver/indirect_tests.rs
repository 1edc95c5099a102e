//! Chains with indirect tables, which our driver does not post: drivers of guests do.

use super::{AddError, Buffer, Descriptor, DriverQueue};
use crate::split::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_LEN};

impl Descriptor {
    pub(in crate::split) fn to_bytes(self) -> [u8; DESC_LEN] {
        let [addr, rest] = self.to_words().map(u64::from_le);
        (u128::from(addr) | u128::from(rest) << 64).to_le_bytes()
    }
}

impl DriverQueue {
    /// Adds a chain of descriptors and optionally an indirect table, which is written to its guest
    /// address: every valid form (2.7.5.3.2).
    pub(in crate::split) fn add_mixed(
        &mut self,
        direct: &[Buffer],
        indirect: Option<(u64, &[Buffer])>,
        token: u64,
    ) -> Result<u16, AddError> {
        let rest = indirect.map_or(&[][..], |(_, buffers)| buffers);
        let writable_len = self.check(&[direct, rest].concat())?;
        let count = (direct.len() + usize::from(indirect.is_some())) as u16;
        let table = indirect.map(|(addr, buffers)| self.write_table(addr, buffers));
        let buffers = direct.iter().map(|buffer| buffer.descriptor());
        self.add_chain(count, writable_len, buffers.chain(table), token)
    }

    fn write_table(&self, addr: u64, buffers: &[Buffer]) -> Descriptor {
        let len = (DESC_LEN * buffers.len()) as u32;
        let mut table = Vec::new();
        let mem = self.rings.memory();
        mem.translate(addr, len, &mut table)
            .expect("the table lies in memory");
        for (index, buffer) in buffers.iter().enumerate() {
            let mut descriptor = buffer.descriptor();
            if index + 1 < buffers.len() {
                descriptor.flags |= DESC_F_NEXT;
                descriptor.next = (index + 1) as u16;
            }
            mem.write(&table, DESC_LEN * index, &descriptor.to_bytes());
        }
        Descriptor {
            addr,
            len,
            flags: DESC_F_INDIRECT,
            next: 0,
        }
    }
}
