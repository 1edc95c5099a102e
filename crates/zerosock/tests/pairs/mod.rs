//! Devices with several queue pairs (docs/queue-pairs.md): connections begin at the pair of their
//! hash, and stay there whatever an older driver asks for.

mod counting;
mod endpoints;
mod guest;
mod hosted;
mod hostile;
mod placing;
mod streams;
