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
#[path = "settings_tests.rs"]
mod tests;
