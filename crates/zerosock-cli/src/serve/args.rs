//! Flags of `zerosock serve`.
//!
//! A superset of the command line of vhost-device-vsock 0.3: its flags have the same meaning here.
//! This file has only the checks that clap can make; [`super::settings`] does the rest.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::attach_flags::RawAttach;
use super::forward::ForwardFlags;
use super::vm::{RawVm, VmFlags};
use crate::duration;
use crate::logging::LogFlags;
use crate::number;
use crate::sandbox::SandboxFlags;
use crate::size;
use crate::socket_access::AccessFlags;

/// Serve virtual machines: one vhost-user vsock device per VM
///
/// The device connects programs in a guest (AF_VSOCK sockets, CID 2 is the host) with programs on
/// the host (Unix sockets). Give one VM with --socket and --uds-path, several with --vm, or write
/// them into a file and give --config.
#[derive(Clone, Debug, Args)]
#[command(after_long_help = crate::help::text(AFTER_HELP), next_line_help = false)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) vm_flags: VmFlags,

    /// One VM as key=value pairs joined by commas; repeat for more VMs
    ///
    /// Keys: guest-cid, socket, uds-path, uds-path-seqpacket, forward-cid, forward-listen,
    /// tx-buffer-size, queue-size, groups, require-sealed-memory (true or false), guest-endpoints. They mean what
    /// the flags of the same name mean, and may be written with `_`.
    #[arg(
        long,
        value_name = "KEY=VALUE,...",
        conflicts_with = "config",
        value_parser = super::vm::parse_vm,
        help_heading = "Virtual machines"
    )]
    pub(crate) vm: Vec<RawVm>,

    /// A YAML file with a list `vms`, one entry per VM, keys as for --vm, and perhaps `attach` with
    /// the keys socket, mode, uid, groups, max, uds_path, service_uid, service_max, the lists `access`,
    /// `forward` and `listen`, `spin_us`, `max_memory` and `max_memory_total`
    ///
    /// The file is read again on SIGHUP: new VMs are added, missing ones are removed, and groups,
    /// guest endpoints, access, forwarding and listening rules, users and numbers of processes take effect. Existing connections continue. The
    /// log names changes that need a restart; a file with an error changes nothing.
    #[arg(long, value_name = "FILE", help_heading = "Virtual machines")]
    pub(crate) config: Option<PathBuf>,

    /// Serve in this process alone: if it ends, its VMs lose their device until they restart
    ///
    /// Without this, and with --config or --vm, another process serves, and this one starts it again when
    /// it ends: the device goes on, and its connections end with a reset.
    #[arg(long, help_heading = "The daemon")]
    pub(crate) no_supervisor: bool,

    #[command(flatten)]
    pub(crate) attach: RawAttach,

    #[command(flatten)]
    pub(crate) forward: ForwardFlags,

    #[command(flatten)]
    pub(crate) daemon: DaemonFlags,
}

impl ServeArgs {
    /// Whether a supervisor is to start the process that serves. A file that cannot be read twice, such as
    /// a pipe, is for this process alone.
    pub(crate) fn wants_supervisor(&self) -> bool {
        let has_file = self.config.as_ref().is_some_and(|path| path.is_file());
        !self.no_supervisor && (has_file || !self.vm.is_empty())
    }
}

/// The flags that hold for the whole daemon and go with every way of naming VMs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "The daemon")]
pub(crate) struct DaemonFlags {
    /// Which port the line `OK PORT` names after CONNECT
    #[arg(long, value_enum, default_value_t = OkPort::Guest)]
    pub(crate) ok_port: OkPort,

    #[command(flatten)]
    pub(crate) sockets: AccessFlags,

    /// Connections that one VM may have at once; more are refused with a reset [default: 131072, or
    /// as many descriptors as one VM can have, if that is less and there are host sockets]
    ///
    /// A connection to a host program uses a descriptor; one to another VM or a process uses none.
    /// Half of the descriptors (RLIMIT_NOFILE, less those of the daemon itself) is divided by the
    /// number of VMs and of users allowed to attach: each is guaranteed its part. The other half is
    /// shared on demand. The log has the numbers at the start.
    #[arg(long, value_parser = number::parse::<u64>, value_name = "N")]
    pub(crate) max_connections: Option<u64>,

    /// Bytes of memory that one VM, or all processes of one user together, may have mapped here
    /// [default: 1T]
    ///
    /// With K, M, G or T for powers of 1024. A monitor that sends more is refused and disconnected;
    /// while a VM's memory changes, its earlier regions count too. The limit is on address space:
    /// unused pages cost nothing.
    #[arg(long, value_parser = size::parse, value_name = "BYTES")]
    pub(crate) max_memory: Option<u64>,

    /// Bytes of memory that all VMs and processes together may have mapped here [default: 64T]
    #[arg(long, value_parser = size::parse, value_name = "BYTES")]
    pub(crate) max_memory_total: Option<u64>,

    /// Queue pairs that a driver with the multi-queue feature may use, each on the next worker, 1
    /// to 16; stock guests use one
    #[arg(long, value_parser = number::parse::<u64>, value_name = "N", default_value_t = 1)]
    pub(crate) queue_pairs: u64,

    /// Refuse guest memory that can shrink: each region must be a memfd with F_SEAL_SHRINK, as those
    /// of QEMU (memory-backend-memfd) and crosvm are. For all VMs; --vm and --config have a key of
    /// the same name for single ones. Memory of attached processes must be sealed in any case
    #[arg(long)]
    pub(crate) require_sealed_memory: bool,

    /// Longest time for a connection to be established, in either direction, and for a CONNECT line
    /// to arrive. Linux guests give up by themselves after 2 s: with less, they get an answer
    #[arg(long, value_name = "SECONDS", default_value = "1.5", value_parser = duration::parse)]
    pub(crate) connect_timeout: Duration,

    /// Longest pause of a VM that its connections outlast; 0: any
    ///
    /// A guest that is reset looks like one that is paused to most monitors (QEMU before 9.2): host
    /// programs read the end of their connections when the next driver starts, or after this time. For
    /// all VMs; --vm and --config have a key of the same name for single ones.
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = duration::parse)]
    pub(crate) stopped_timeout: Duration,

    /// Threads that move data; a VM belongs to one of them [default: one per CPU, no more than
    /// VMs unless processes may attach]
    #[arg(long, value_parser = number::parse::<u64>, value_name = "N")]
    pub(crate) workers: Option<u64>,

    /// Microseconds that a worker polls for more work before it sleeps [default: 0, no polling]
    ///
    /// Polling lowers latency, and guests need not kick. It costs up to this much CPU time for each
    /// pause in the traffic, and only while most pauses are shorter than that: an idle daemon uses
    /// no CPU. Give each worker a CPU of its own (--cpus), or other threads wait meanwhile. 20 to
    /// 100 is sensible.
    #[arg(long, value_parser = number::parse::<u64>, value_name = "N")]
    pub(crate) spin_us: Option<u64>,

    /// CPUs to pin the workers to, in turn, such as 0-3,5 [default: not pinned]
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<String>,

    #[command(flatten)]
    pub(crate) sandbox: SandboxFlags,

    #[command(flatten)]
    pub(crate) log: LogFlags,
}

/// The port number in the OK line of the hybrid convention.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum OkPort {
    /// The guest's port, as vhost-device-vsock does
    Guest,
    /// The host-side port of the connection, as Firecracker and cloud-hypervisor do
    Host,
}

const AFTER_HELP: &str = "\
Examples:
  One VM:
    zerosock serve --guest-cid 3 --socket /tmp/vm3.vhost --uds-path /tmp/vm3.vsock
  Two VMs that may also talk to each other (a group in common):
    zerosock serve --vm guest-cid=3,socket=/tmp/3.vhost,uds-path=/tmp/3.vsock,groups=web \\
                   --vm guest-cid=4,socket=/tmp/4.vhost,uds-path=/tmp/4.vsock,groups=web+db
  The same from a file, for a group of users, pinned to two CPUs:
    zerosock serve --config vms.yaml --socket-mode 0660 --socket-group kvm --cpus 2,3

    # vms.yaml
    vms:
      - guest_cid: 3
        socket: /tmp/3.vhost
        uds_path: /tmp/3.vsock
        groups: web

Access rules in the file restrict or extend groups. The first matching rule decides; without one,
endpoints in a common group reach each other, and the host and all endpoints reach each other:

    access:
      - allow: {from: 'name:web', to: 'group:db', ports: 5432}
      - deny:  {from: any, to: 'group:db', ports: 5432+6000-6010}
      - deny:  {from: 3-9, to: host, ports: 22}

To and from the network (docs/forward.md): guests reach a web server at port 8080 of CID 2, and
clients on this machine the guest's SSH at 127.0.0.1:2222:
  zerosock serve --guest-cid 3 --socket /tmp/vm3.vhost --uds-path /tmp/vm3.vsock \\
                 --forward 8080=tcp:example.com:80 --listen tcp:127.0.0.1:2222=3:22

Processes without a VM (docs/attach.md has the protocol, zerosock::attach the library's side):
  zerosock serve --vm guest-cid=3,socket=/tmp/3.vhost,uds-path=/tmp/3.vsock \\
                 --attach-socket /run/zerosock/attach --attach-mode 0660 --attach-uid 1000
They reach VMs and each other by CID, if they have a group in common. Without any VM the switch
is for processes alone. With --attach-uds-path /run/zerosock/p{cid} each has hybrid sockets too.
Host services: processes that claim ports of CID 2 on the same socket, for all guests at once;
connections to unclaimed ports go to the --uds-path sockets:
  zerosock nc service-listen:/run/zerosock/attach:1234

Attach QEMU (the guest's memory must be shared; sizes must agree):
  qemu-system-x86_64 -m 512M \\
    -object memory-backend-memfd,id=mem,size=512M,share=on -numa node,memdev=mem \\
    -chardev socket,id=vsock,path=/tmp/vm3.vhost \\
    -device vhost-user-vsock-pci,chardev=vsock ...
Attach crosvm:
  crosvm run --vhost-user vsock,socket=/tmp/vm3.vhost ...

Host to guest (hybrid vsock, the convention of Firecracker): connect to the --uds-path socket,
send `CONNECT PORT` and a newline, read `OK PORT` and a newline; then the connection is the
guest's. Without a listener on that port in the guest, the socket closes without an OK. The line
may have small letters, more blanks and further words, and has at most 32 bytes.
  zerosock nc hybrid:/tmp/vm3.vsock:1234          or: socat - UNIX:/tmp/vm3.vsock
Guest to host: the guest connects to CID 2, port 1234; the daemon connects to PATH_1234.
Messages (SOCK_SEQPACKET): the same at --uds-path-seqpacket, with Unix sockets of that type. Each
message is one packet, and so are the CONNECT and the OK line.
  zerosock nc unix-listen:/tmp/vm3.vsock_1234

Sockets: a path in use by a live process is refused, a stale one is replaced, any other
file is refused and left unchanged. Sockets made here are removed on SIGTERM and SIGINT.

Signals: SIGUSR1 logs the counters, SIGHUP reads the file of --config again, SIGINT and SIGTERM end the
service.

systemd: Type=notify and WatchdogSec= work. Sockets passed in (LISTEN_FDS) are used for the VM
whose path they are bound to, or for the rule of --listen with their address; otherwise by
FileDescriptorName=: `socket-CID` or `uds-path-CID` (`socket`, `uds-path` when there is one VM).
They are not removed at the end.";
