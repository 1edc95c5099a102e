//! The command line: the subcommands. The flags of each are in its own module.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::{Parser, Subcommand};

use crate::vm::parent_watchdog;
use crate::{demo, guest, nc, net, perf, relay, serve};

/// Sockets between virtual machines and their host, without copying the bytes in between.
///
/// zerosock is a vhost-user vsock device for QEMU, crosvm, libkrun and other virtual machine
/// monitors, and the small tools around it. No kernel module, no patched kernel.
#[derive(Debug, Parser)]
#[command(name = "zerosock", version, max_term_width = 100, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(Box<serve::args::ServeArgs>),
    Net(Box<net::args::NetArgs>),
    Nc(nc::args::NcArgs),
    Relay(Box<relay::args::RelayArgs>),
    Guest(Box<guest::args::GuestArgs>),
    Demo(demo::args::DemoArgs),
    Perf(perf::args::PerfArgs),
    #[command(hide = true)]
    DemoGuest(demo::guest::GuestArgs),
    #[command(hide = true)]
    ParentWatchdog(parent_watchdog::ParentWatchdogArgs),
}

const AFTER_HELP: &str = "\
Start here:
  zerosock serve --guest-cid 3 --socket /tmp/vm3.vhost --uds-path /tmp/vm3.vsock
  zerosock serve --help     how to attach a VM, and how host programs reach it
  zerosock net --help       a network device for a VM, on a TAP interface
  zerosock nc --help        netcat for vsock and for what `serve` offers
  zerosock relay --help     relay between TCP, UDP, Unix sockets and vsock
  zerosock guest --help     in a VM: endpoints for its programs, on pages of the guest

Exit codes: 0 all went well, 1 it could not be done, 2 an option is wrong.";

/// Lets a symbolic link named `vhost-device-vsock` stand in for that program: `serve` is then
/// implied, and an existing unit file or script need not change.
pub(crate) fn with_implied_command(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.collect();
    let name = args
        .first()
        .and_then(|program| Path::new(program).file_name());
    if name == Some(OsStr::new("vhost-device-vsock")) {
        args.insert(1, "serve".into());
    }
    args
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_of_the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_lists_what_users_run_and_nothing_else() {
        let command = Cli::command();
        let listed = command.get_subcommands().filter(|one| !one.is_hide_set());
        let names: Vec<&str> = listed.map(clap::Command::get_name).collect();
        assert_eq!(
            names,
            ["serve", "net", "nc", "relay", "guest", "demo", "perf"]
        );
    }

    #[test]
    fn a_link_named_like_the_peer_implies_serve() {
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let typed = words(&["/usr/bin/vhost-device-vsock", "--socket", "s"]);
        assert_eq!(
            with_implied_command(typed.into_iter()),
            words(&["/usr/bin/vhost-device-vsock", "serve", "--socket", "s"])
        );
        let typed = words(&["zerosock", "nc", "unix:x"]);
        assert_eq!(with_implied_command(typed.clone().into_iter()), typed);
    }
}
