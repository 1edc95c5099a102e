//! `zerosock net` with stock guests under QEMU and user-mode Linux. Every scenario has a network
//! namespace, a daemon and guests of its own.

pub(crate) mod guest;
mod guide;
pub(crate) mod lab;
mod sizes;
mod switch;
mod tap;
pub(crate) mod traffic;

use crate::Alone;

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("user_mode_over_a_tap", tap::user_mode),
    ("qemu_over_a_tap", tap::qemu),
    ("user_mode_with_large_frames", sizes::user_mode),
    ("qemu_with_large_frames_on_two_queues", sizes::qemu),
    ("guests_on_a_switch", switch::guests),
    ("guests_with_offloads_on_a_switch", switch::offloads),
    ("guide", guide::guide),
    ("guide_to_the_network", guide::network),
];
