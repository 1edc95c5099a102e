//! Validated settings of `zerosock perf`.

use std::path::PathBuf;

use zerosock::vsock::rxmap::PAGE;
use zerosock::{Address, Cid, Port};

pub(super) use super::args::Mode;
use super::args::PerfArgs;
use crate::failure::Failure;

/// Bytes of a megabyte, as `vsock_rx_perf` counts.
const MEGABYTE: u64 = 1 << 20;
/// "For sender, tx buffer (which is passed to 'write()') size is 16Mb."
const SERVER_PAGES: u32 = 4096;
const CLIENT_PAGES: u32 = 32;

/// Settings of one side.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) endpoint: EndpointKind,
    pub(super) role: Role,
    /// Bytes of a write; for a dequeue, the most.
    pub(super) buffer: usize,
    pub(super) output: Output,
}

/// How the figures are printed.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Output {
    Text,
    Json,
}

/// The kind of endpoint that the sockets belong to.
#[derive(Clone, Debug)]
pub(super) enum EndpointKind {
    /// A guest: the kernel's AF_VSOCK.
    Kernel,
    /// A process that attaches at this attach socket.
    Attach(PathBuf),
    /// The guest at this vhost-user socket, by zerosock's driver.
    Device(PathBuf),
    /// The host, with devices in this process.
    Host {
        vm: Option<(Cid, PathBuf)>,
        attach: Option<PathBuf>,
    },
}

#[derive(Clone, Debug)]
pub(super) enum Role {
    Server(Server),
    Client(Client),
}

#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) port: Port,
    pub(super) bytes: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Client {
    pub(super) peer: Address,
    pub(super) mode: Mode,
    /// SO_RCVLOWAT in bytes.
    pub(super) low_water: u32,
    /// Unread bytes in flight from the peer, at most.
    pub(super) credit: u32,
    pub(super) check_mode: CheckMode,
}

/// Processing of received bytes by a client, outside of the dequeue calls.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum CheckMode {
    None,
    Touch,
    Verify,
}

impl Settings {
    fn host(
        vm: Option<PathBuf>,
        cid: Cid,
        attach: Option<PathBuf>,
    ) -> Result<EndpointKind, Failure> {
        if vm.is_none() && attach.is_none() {
            return Err(Failure::usage(
                "--host: nothing can connect; give --vm-socket or --attach-socket",
            ));
        }
        let cid = cid
            .for_guest()
            .map_err(|error| Failure::usage(format_args!("--vm-cid {cid}: {error}")))?;
        let vm = vm.map(|path| (cid, path));
        Ok(EndpointKind::Host { vm, attach })
    }

    pub(super) fn new(args: PerfArgs) -> Result<Settings, Failure> {
        let endpoint = match (args.attach, args.device) {
            _ if args.host => Settings::host(args.vm_socket, args.vm_cid, args.attach_socket)?,
            (Some(path), _) => EndpointKind::Attach(path),
            (None, Some(path)) => EndpointKind::Device(path),
            (None, None) => EndpointKind::Kernel,
        };
        let output = match args.json {
            true => Output::Json,
            false => Output::Text,
        };
        let pages = args.buffer.unwrap_or(if args.server {
            SERVER_PAGES
        } else {
            CLIENT_PAGES
        });
        let most = i32::MAX as u32 / PAGE as u32;
        if pages == 0 || pages > most {
            return Err(Failure::usage(format_args!(
                "-b {pages}: give a number of pages from 1 to {most}"
            )));
        }
        let buffer = pages as usize * PAGE;
        let port = args.port;
        let Some(cid) = args.cid else {
            let bytes = u64::from(args.megabytes) * MEGABYTE;
            return Ok(Settings {
                endpoint,
                role: Role::Server(Server { port, bytes }),
                buffer,
                output,
            });
        };
        let mode = args.mode;
        if matches!(endpoint, EndpointKind::Kernel) && mode != Mode::Copy {
            return Err(Failure::usage(
                "-z y and -z u: the kernel's AF_VSOCK has no receive maps; give --attach, \
                 --device or --host, or -z n",
            ));
        }
        if args.credit == 0 {
            return Err(Failure::usage("-v 0: without credit nothing is sent"));
        }
        let low_water = args.low_water.unwrap_or(buffer as u32);
        if low_water > args.credit {
            return Err(Failure::usage(format_args!(
                "-r {low_water}: more than the {} bytes of credit (-v) are never there at once",
                args.credit
            )));
        }
        let check_mode = match (args.verify, args.touch) {
            (true, _) => CheckMode::Verify,
            (false, true) => CheckMode::Touch,
            (false, false) => CheckMode::None,
        };
        let role = Role::Client(Client {
            peer: Address::new(cid, port),
            mode,
            low_water,
            credit: args.credit,
            check_mode,
        });
        Ok(Settings {
            endpoint,
            role,
            buffer,
            output,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: PerfArgs,
    }

    fn settings(line: &str) -> Result<Settings, String> {
        let words = std::iter::once("perf").chain(line.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        Settings::new(line.args).map_err(|failure| failure.to_string())
    }

    #[test]
    fn the_originals_defaults() {
        let server = settings("-s").unwrap();
        assert_eq!(server.buffer, 16 << 20);
        let Role::Server(Server { port, bytes }) = server.role else {
            panic!("{server:?}");
        };
        assert_eq!((port, bytes), (Port::new(1234), 2 << 30));
        let client = settings("-c host").unwrap();
        assert_eq!(client.buffer, 128 << 10);
        let Role::Client(client) = client.role else {
            panic!("{client:?}");
        };
        assert_eq!(client.peer, Address::new(Cid::HOST, Port::new(1234)));
        assert_eq!(
            (client.mode, client.check_mode),
            (Mode::Copy, CheckMode::None)
        );
        assert_eq!((client.credit, client.low_water), (2 << 30, 128 << 10));
    }

    #[test]
    fn every_option_of_the_original() {
        let server = settings("-s -m 7 -b 2 -p 5").unwrap();
        assert_eq!(server.buffer, 8192);
        assert!(matches!(
            server.role,
            Role::Server(Server { bytes: 0x70_0000, port }) if port == Port::new(5)
        ));
        let modes = [
            ("n", Mode::Copy),
            ("y", Mode::InPlace),
            ("u", Mode::InPlacePolling),
        ];
        for (letter, mode) in modes {
            let line = format!("-c 9 -b 3 -r 100 -v 70000 -z {letter} --device x --touch");
            let client = settings(&line).unwrap();
            assert_eq!(client.buffer, 3 * 4096);
            let Role::Client(client) = client.role else {
                panic!("{client:?}");
            };
            assert_eq!((client.mode, client.check_mode), (mode, CheckMode::Touch));
            assert_eq!((client.credit, client.low_water), (70_000, 100));
        }
    }

    #[test]
    fn flags_select_the_kind_of_endpoint() {
        for (line, endpoint) in [
            ("-s", "Kernel"),
            ("-s --attach a", "Attach(\"a\")"),
            ("-c 2 -z u --device d", "Device(\"d\")"),
            (
                "-s --host --vm-socket v --vm-cid 0x5",
                "Host { vm: Some((Cid(5), \"v\")), attach: None }",
            ),
            (
                "-c 4 -z y --host --attach-socket a",
                "Host { vm: None, attach: Some(\"a\") }",
            ),
        ] {
            assert_eq!(format!("{:?}", settings(line).unwrap().endpoint), endpoint);
        }
    }

    #[test]
    fn invalid_flag_combinations_are_refused_with_the_reason() {
        for (line, reason) in [
            ("", "--server"),
            ("-s -c 3", "cannot be used with"),
            ("-s -z y", "cannot be used with"),
            ("-s -r 5", "cannot be used with"),
            ("-c 3 -z x", "possible values"),
            ("-c 3 -z y", "no receive maps"),
            ("-c 3 -z u", "no receive maps"),
            ("-c 3 -b 0", "from 1 to 524287"),
            ("-c 3 -v 0", "credit"),
            ("-c 3 -v 1000 -r 1001", "never there at once"),
            ("-s -m -1", "unexpected argument"),
            ("-s -m x", "whole number"),
            ("-s --attach a --device b", "cannot be used with"),
            ("-s --host --device b", "cannot be used with"),
            ("-s --vm-socket b", "--host"),
            ("-s --host", "--vm-socket"),
            ("-s --host --vm-socket x --vm-cid 2", "--vm-cid 2"),
            ("-c any", "local or host"),
            ("-c 4294967295", "local or host"),
            ("-c 2 -p any", "4294967294"),
        ] {
            let said = settings(line).unwrap_err();
            assert!(said.contains(reason), "{line}: {said}");
        }
    }
}
