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
#[path = "sent_tests.rs"]
mod tests;
