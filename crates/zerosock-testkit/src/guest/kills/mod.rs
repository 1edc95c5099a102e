//! Kills clients, agents, and all processes of zerosock but the keeper, under traffic, while all free memory of this guest
//! has patterns that are checked; and attaches and detaches many times. Whatever is killed, no foreign byte changes, and
//! nothing leaks.

mod client;
pub mod exchange;
mod lab;
mod own_pages;
mod patterns;
mod processes;
mod terms;

use std::fs;
use std::io;

use clap::Subcommand;

use self::processes::LOG;

#[derive(Debug, Subcommand)]
pub(super) enum Step {
    /// Attaches and detaches, then kills
    Run(lab::Options),
    /// A client that streams
    Client(client::Options),
}

pub(super) fn run(step: Step) -> io::Result<()> {
    match step {
        Step::Client(options) => client::run(&options),
        Step::Run(options) => lab::run(&options).map_err(|error| {
            let log = fs::read_to_string(LOG).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(20)..].join("\n");
            io::Error::other(format!("{error}\nthe agent's log:\n{last}"))
        }),
    }
}
