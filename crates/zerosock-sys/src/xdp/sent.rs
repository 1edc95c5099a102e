//! Frames that the kernel reads, and their completion.

use std::collections::VecDeque;

/// Frames in flight. The kernel returns the addresses of descriptors, in an order of its own; frames
/// complete in the order in which they were sent.
#[derive(Debug, Default)]
pub(super) struct Sent(VecDeque<Part>);

#[derive(Debug)]
struct Part {
    addr: u64,
    /// The last descriptor of its frame.
    last: bool,
    completed: bool,
}

impl Sent {
    /// Adds a descriptor.
    pub(super) fn push(&mut self, addr: u64, last: bool) {
        self.0.push_back(Part {
            addr,
            last,
            completed: false,
        });
    }

    /// Takes an address that the kernel has returned: that of the oldest descriptor with this address, if
    /// the same bytes were sent twice. The lowest bit is not compared: Linux 6.18 returns it as 0. Returns how many frames, the oldest ones, are complete by it.
    pub(super) fn complete(&mut self, addr: u64) -> usize {
        // Nearly always the first one.
        let mut parts = self.0.iter_mut();
        let Some(part) = parts.find(|part| part.addr >> 1 == addr >> 1 && !part.completed) else {
            return 0;
        };
        part.completed = true;
        let mut frames = 0;
        while let Some(part) = self.0.front()
            && part.completed
        {
            frames += usize::from(part.last);
            self.0.pop_front();
        }
        frames
    }

    /// Descriptors that are not part of a complete prefix.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(frames: &[&[u64]]) -> Sent {
        let mut sent = Sent::default();
        for frame in frames {
            for (index, addr) in frame.iter().enumerate() {
                sent.push(*addr, index + 1 == frame.len());
            }
        }
        sent
    }

    #[test]
    fn frames_complete_in_the_order_in_which_they_were_sent() {
        let mut sent = sent(&[&[10], &[20], &[30]]);
        assert_eq!(sent.complete(30), 0);
        assert_eq!(sent.complete(10), 1);
        assert_eq!(sent.complete(20), 2);
        assert_eq!(sent.len(), 0);
    }

    #[test]
    fn frame_completes_with_the_last_of_its_descriptors() {
        let mut sent = sent(&[&[10, 20, 30], &[40]]);
        assert_eq!(sent.complete(30), 0);
        assert_eq!(sent.complete(40), 0);
        assert_eq!(sent.complete(10), 0);
        assert_eq!(sent.len(), 3);
        assert_eq!(sent.complete(20), 2);
    }

    #[test]
    fn oldest_of_equal_addresses_completes_first() {
        let mut sent = sent(&[&[7], &[8], &[7]]);
        assert_eq!(sent.complete(7), 1);
        assert_eq!(sent.complete(7), 0);
        assert_eq!(sent.complete(8), 2);
    }

    #[test]
    fn lowest_bit_of_an_address_may_be_lost() {
        let mut sent = sent(&[&[13], &[21]]);
        assert_eq!(sent.complete(12), 1);
        assert_eq!(sent.complete(21), 1);
    }

    #[test]
    fn unknown_addresses_complete_nothing() {
        let mut sent = sent(&[&[7]]);
        assert_eq!(sent.complete(9), 0);
        assert_eq!(sent.complete(7), 1);
        assert_eq!(sent.complete(7), 0);
    }
}
