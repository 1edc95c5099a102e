//! The program inside the guests of tests and benchmarks, when its first argument is [`NAME`].

mod agent;
mod attach;
mod blocks;
mod calls;
mod forward;
mod kexec;
pub mod kills;
pub mod leases;
mod owned;
mod pages;
mod patterns;
mod sockmap;
mod stream;
pub mod traffic;
mod vsock_calls;
mod xstate;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use zerosock_cli::Failure;

/// The first argument of the agent's program.
pub const NAME: &str = "test-guest";

#[derive(Debug, Parser)]
#[command(name = NAME)]
enum Command {
    /// Run the host's commands from a serial line
    Agent {
        /// The serial line
        #[arg(long)]
        tty: PathBuf,
    },
    /// Tests `serve --forward-cid` on this guest's own AF_VSOCK
    Forward,
    /// Relays between this guest's own AF_VSOCK and other sockets, in several ways
    Sockmap(sockmap::Options),
    /// Attaches at the socket of `zerosock guest`
    Attach(attach::Options),
    /// Starts another kernel
    #[command(subcommand)]
    Kexec(kexec::Step),
    /// Receives in leases and sends in loans, on pages of this guest
    Leases(leases::Options),
    /// Exchanges bytes with the host without end, on pages of this guest
    Traffic(traffic::Options),
    /// Kills clients, agents and all but the keeper
    #[command(subcommand)]
    Kills(kills::Step),
    /// Takes, pins and frees huge pages of this guest
    #[command(subcommand)]
    Pages(pages::Step),
    /// Become a program of a user without capabilities
    Unprivileged {
        /// The user
        #[arg(long, default_value = "65534")]
        uid: u32,
        /// Program and arguments
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
    /// Become a program of root that has not CAP_SYS_ADMIN
    WithoutSysAdmin {
        /// Program and arguments
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
    /// On the host: become a program without access to the processor's extended state
    HideXstate {
        /// Program and arguments
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
}

/// Returns only if the program cannot be executed.
fn become_program(argv: &[OsString], uid: u32) -> io::Error {
    let Some((program, arguments)) = argv.split_first() else {
        return io::ErrorKind::InvalidInput.into();
    };
    let mut command = std::process::Command::new(program);
    command.args(arguments).uid(uid).gid(uid).exec()
}

/// Runs the subcommand of the arguments after [`NAME`].
pub fn main() -> ExitCode {
    let done = match Command::parse_from(std::env::args_os().skip(1)) {
        Command::Agent { tty } => agent::run(&tty),
        Command::Forward => forward::run(),
        Command::Sockmap(options) => sockmap::run(&options),
        Command::Attach(options) => attach::run(&options),
        Command::Kexec(step) => kexec::run(&step),
        Command::Leases(options) => leases::run(&options),
        Command::Traffic(options) => traffic::run(&options),
        Command::Kills(step) => kills::run(step),
        Command::Pages(step) => pages::run(step),
        Command::Unprivileged { uid, argv } => Err(become_program(&argv, uid)),
        Command::WithoutSysAdmin { argv } => {
            remove_capability_from_bounding_set(CapabilitySet::SYS_ADMIN)
                .map_err(io::Error::from)
                .and_then(|()| Err(become_program(&argv, 0)))
        }
        Command::HideXstate { argv } => xstate::run(&argv),
    };
    Failure::exit_code(NAME, done.map_err(Failure::runtime))
}
