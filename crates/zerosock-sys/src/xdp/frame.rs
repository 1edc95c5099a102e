//! The descriptors of one frame to send.

/// Most descriptors of one frame: what fits into a packet of the kernel. A frame of more vanishes there.
pub const MAX_PARTS: usize = 18;

/// The descriptors of one frame: ranges of a UMEM, in order.
#[derive(Copy, Clone, Debug, Default)]
pub struct XdpFrame {
    /// Address and length of each, of which the first `count` are valid.
    parts: [(u64, u32); MAX_PARTS],
    count: usize,
}

impl XdpFrame {
    /// A frame in one range.
    pub fn of_one(addr: u64, len: u32) -> XdpFrame {
        let mut frame = XdpFrame::default();
        frame.push(addr, len);
        frame
    }

    /// Adds a range. False: the frame has [`MAX_PARTS`] already.
    pub fn push(&mut self, addr: u64, len: u32) -> bool {
        let Some(part) = self.parts.get_mut(self.count) else {
            return false;
        };
        *part = (addr, len);
        self.count += 1;
        true
    }

    /// Address and length of each range.
    pub fn parts(&self) -> &[(u64, u32)] {
        self.parts.get(..self.count).unwrap_or_default()
    }
}
