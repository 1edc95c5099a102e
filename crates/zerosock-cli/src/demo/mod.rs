//! `zerosock demo`.
use crate::failure::Failure;
/// Flags of `zerosock demo`.
#[derive(clap::Args, Debug)]
pub(crate) struct DemoArgs {}
/// Runs `zerosock demo`.
pub(crate) fn main(_: DemoArgs) -> Result<(), Failure> { Ok(()) }
