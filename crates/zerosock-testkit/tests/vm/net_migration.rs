//! Guests of `zerosock net` that move to another back-end, or that lose their back-end, while they send and
//! receive over TCP. The back-ends have interfaces on one bridge, in a network namespace of the test's own.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_send_buffer_size;
use serde_json::json;
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use zerosock_cli::vm::accel::Accel;
use zerosock_cli::vm::children::{self, Guarded, Log};
use zerosock_cli::vm::hybrid;
use zerosock_cli::vm::initramfs::Builder;
use zerosock_cli::vm::kernel::Kernel;
use zerosock_cli::vm::pattern::Pattern;
use zerosock_cli::vm::qemu;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::remote::{Remote, agent};

use crate::lab::{STEP, Skipped, cache, echo, guest_program, short_dir, zerosock};
use crate::monitor::Monitor;
use crate::net::lab::{Daemon, ip, isolate, needs_ethtool, run, try_run};
use crate::{Alone, kernels};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("a_guest_moves_to_another_tap", || {
        migrate(
            "6.12",
            "",
            BridgedNamespace::tap,
            |lab| lab.tap("second"),
            |_| {},
        )
    }),
    // The switch has a second port.
    ("a_guest_moves_to_a_switch_that_announces_it", || {
        let switch = |lab: &BridgedNamespace| {
            let other = lab.path("other").display().to_string();
            lab.serve(
                "second",
                &format!("--socket {other} {}", on_bridge("second")),
            )
        };
        migrate(
            "6.1",
            ",guest_announce=off",
            BridgedNamespace::tap,
            switch,
            |_| {},
        )
    }),
    ("a_guest_moves_between_queues_of_af_xdp", || {
        needs_ethtool()?;
        // Frames are copied until the kernel has taken the guest's memory.
        let in_place = |second: &Daemon| {
            for way in ["rx", "tx"] {
                let [all, copied] = ["bytes", "copied"]
                    .map(|name| second.counter("second:0", &format!("{way}_{name}")));
                assert!(copied < all / 2, "{way}: {copied} of {all} were copied");
            }
        };
        migrate(
            "6.12",
            "",
            BridgedNamespace::xdp,
            |lab| lab.xdp("second"),
            in_place,
        )
    }),
    ("a_killed_back_end_is_replaced", replace),
];

const HOST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const BRIDGE: &str = "br0";
const MAC: &str = "52:54:00:12:34:56";
/// Bytes that pass in each direction before and after what the test does.
const ENOUGH: u64 = 2 << 20;
/// Bytes that are written at once, and the time from one write to the next.
const CHUNK: usize = 32 << 10;
const PACE: Duration = Duration::from_millis(4);

/// A network namespace with a bridge, and what guests boot from.
struct BridgedNamespace {
    kernel: Kernel,
    initramfs: PathBuf,
    dir: TempDir,
}

impl BridgedNamespace {
    fn new(release: &str) -> Result<BridgedNamespace, Skipped> {
        let kernel = kernels::debian(release)?;
        isolate()?;
        // An address of its own, because that of its ports changes.
        let bridge = format!("link add {BRIDGE} address 52:54:00:00:00:01 type bridge");
        if let Err(reason) = try_run("ip", &bridge) {
            return Err(Skipped(format!("no bridge: {reason}")));
        }
        ip(&format!("addr add {HOST}/24 dev {BRIDGE}"));
        ip(&format!("link set {BRIDGE} up"));
        let dir = short_dir();
        let initramfs = dir.path().join("initramfs");
        let modules = ["failover", "net_failover", "virtio_net"];
        let agent = agent(qemu::TTY);
        let image = Builder::new(&cache(), &kernel, &guest_program(), &agent, &modules);
        std::fs::write(&initramfs, image.expect("an initramfs").finish()).expect("a file");
        Ok(BridgedNamespace {
            kernel,
            initramfs,
            dir,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A back-end with this interface, for the guest at the socket `name`.
    fn serve(&self, name: &str, interface: &str) -> Daemon {
        let socket = self.path(name).display().to_string();
        Daemon::start(&format!("--socket {socket} {interface}"))
    }

    /// One with a TAP.
    fn tap(&self, name: &str) -> Daemon {
        self.serve(name, &on_bridge(name))
    }

    /// One with a veth interface. The other end is on the bridge.
    fn xdp(&self, name: &str) -> Daemon {
        let queues = "numtxqueues 1 numrxqueues 1";
        let far = format!("far_{name}");
        ip(&format!(
            "link add {name} {queues} type veth peer name {far} {queues}"
        ));
        ip(&format!("link set {far} master {BRIDGE}"));
        for interface in [name, &far] {
            ip(&format!("link set {interface} up"));
        }
        // The guest takes only frames with checksums, so the sending ends must add them.
        for interface in [BRIDGE, &far] {
            run("ethtool", &format!("-K {interface} tx off"));
        }
        self.serve(name, &format!("--xdp {name}"))
    }

    /// A machine with its card at `socket`; with `incoming` it waits for a guest that moves there.
    fn start(&self, name: &str, socket: &str, properties: &str, incoming: bool) -> Machine {
        let (control, monitor) = (self.path("control"), self.path("monitor"));
        for path in [&control, &monitor] {
            let _ = std::fs::remove_file(path);
        }
        let lines = UnixListener::bind(&control).expect("a socket");
        let monitors = UnixListener::bind(&monitor).expect("a socket");
        let mut options: Vec<String> = Accel::Tcg.options().iter().map(|it| (*it).into()).collect();
        let mut option = |name: &str, value: String| options.extend([format!("-{name}"), value]);
        option("display", "none".into());
        option("m", "256M".into());
        // With a second one, an emulated kernel may crash by executing its own code while that patches it.
        option("smp", "1,maxcpus=2".into());
        let memory = "memory-backend-memfd,id=mem,size=256M,share=on";
        option("object", memory.into());
        option("numa", "node,memdev=mem".into());
        let socket = self.path(socket).display().to_string();
        option("chardev", format!("socket,id=c0,path={socket},reconnect=1"));
        option("netdev", "vhost-user,id=n0,chardev=c0".into());
        // QEMU 7.2 without KVM crashes with interrupt vectors.
        let card = format!("virtio-net-pci,netdev=n0,mac={MAC},vectors=0{properties}");
        option("device", card);
        option("chardev", "stdio,id=console,signal=off".into());
        option("serial", "chardev:console".into());
        option(
            "chardev",
            format!("socket,id=control,path={}", control.display()),
        );
        option("serial", "chardev:control".into());
        option("qmp", format!("unix:{}", monitor.display()));
        option("kernel", self.kernel.image.display().to_string());
        option("initrd", self.initramfs.display().to_string());
        let arguments = "console=ttyS0 quiet panic=-1 reboot=t no_timer_check";
        option("append", arguments.into());
        if incoming {
            option(
                "incoming",
                format!("unix:{}", self.path("incoming").display()),
            );
        }
        let mut command = children::with_parent_watchdog(zerosock(), Path::new(QEMU));
        command.args(["-nodefaults", "-no-user-config", "-no-reboot"]);
        command.args(options).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = Guarded::spawn(&mut command).expect("QEMU");
        let console = Log::default();
        let echo = || echo(name).map(str::to_owned);
        console.follow(process.child().stdout.take().expect("a pipe"), echo());
        console.follow(process.child().stderr.take().expect("a pipe"), echo());
        let accept = |listener| match hybrid::accept(listener, STEP) {
            Ok(stream) => stream,
            Err(error) => panic!("{name}: {error}\n{}", console.tail(10)),
        };
        let line = accept(&lines);
        let monitor = Monitor::new(accept(&monitors));
        let writer = line.try_clone().expect("a descriptor");
        Machine {
            name: name.to_owned(),
            remote: Remote::new(line, writer),
            monitor,
            console,
            process,
        }
    }

    /// A guest that has booted at `socket` and has an address.
    fn boot(&self, socket: &str, properties: &str) -> Machine {
        let machine = self.start("guest", socket, properties, false);
        let release = machine.remote.wait_for_boot(1, 2 * STEP);
        assert!(release.is_some(), "{}", machine.console.tail(15));
        machine.sh("$B ip addr add 10.77.0.2/24 dev eth0 && $B ip link set eth0 up");
        machine.ping();
        machine
    }
}

const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// A TAP on the bridge, as options.
fn on_bridge(name: &str) -> String {
    format!("--tap {name} --bridge {BRIDGE}")
}

impl Drop for BridgedNamespace {
    fn drop(&mut self) {
        if thread::panicking() {
            for words in ["-tine", "-s link", "neigh"] {
                let program = if words == "-tine" { "ss" } else { "ip" };
                let text = try_run(program, words).unwrap_or_else(|text| text);
                eprintln!("{program} {words}:\n{text}");
            }
        }
    }
}

/// Waits until `get` returns something.
#[track_caller]
fn wait_for<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + 2 * STEP;
    loop {
        if let Some(found) = get() {
            return found;
        }
        assert!(Instant::now() < end, "not within the deadline: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A running QEMU.
struct Machine {
    name: String,
    remote: Remote,
    monitor: Monitor,
    console: Log,
    process: Guarded,
}

impl Drop for Machine {
    fn drop(&mut self) {
        if thread::panicking() {
            let status = match self.process.try_wait() {
                Some(status) => format!("has ended: {status}"),
                None => "runs".to_owned(),
            };
            let (name, console) = (&self.name, self.console.tail(25));
            eprintln!("QEMU of {name} {status}; the end of its output:\n{console}");
        }
    }
}

impl Machine {
    fn argv(script: &str) -> Vec<String> {
        let script = format!("B=/bin/busybox; {script}");
        ["/bin/busybox", "sh", "-c", &script]
            .map(str::to_owned)
            .into()
    }

    /// Runs a script in the guest; returns what it prints.
    #[track_caller]
    fn sh(&self, script: &str) -> String {
        let argv = Machine::argv(script);
        match self.remote.run(Command::Run { argv }, 2 * STEP) {
            Ok(outcome) => outcome.text.unwrap_or_default(),
            Err(error) => panic!("{error}\n{}", self.console.tail(10)),
        }
    }

    /// Starts a script in the guest.
    fn spawn(&self, script: &str) {
        let argv = Machine::argv(script);
        let started = self.remote.run(Command::Start { argv }, STEP);
        started.expect("a program in the guest");
    }

    #[track_caller]
    fn ping(&self) {
        let text = self.sh(&format!("$B ping -c 2 -W 10 {HOST}"));
        assert!(text.contains("2 packets received"), "{text}");
    }
}

impl Monitor {
    /// Moves the guest to the machine that listens at `path`.
    fn migrate(&mut self, path: &Path) {
        self.ask("migrate-set-parameters", json!({"downtime-limit": 1000}));
        self.ask(
            "migrate",
            json!({"uri": format!("unix:{}", path.display())}),
        );
        wait_for("migrated", || {
            let info = self.ask("query-migrate", json!({}));
            match info["status"].as_str() {
                Some("completed") => Some(()),
                Some("failed" | "cancelled") => panic!("{info}"),
                _ => None,
            }
        });
    }
}

/// A connection on which bytes go to the guest, and one on which they come from it, at the same time.
struct Traffic {
    sent: Arc<AtomicU64>,
    received: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    sender: JoinHandle<String>,
    receiver: JoinHandle<u64>,
}

fn hex(digest: &[u8]) -> String {
    digest.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Sends a pattern at a steady pace until it is stopped. Returns the digest.
fn send(mut stream: TcpStream, sent: &AtomicU64, stop: &AtomicBool) -> io::Result<String> {
    let chunk = Pattern::bytes(11, CHUNK);
    let mut digest = Sha256::new();
    let mut number = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        // No two chunks are equal.
        let bytes = [&number.to_le_bytes(), &chunk[8..]].concat();
        stream.write_all(&bytes)?;
        digest.update(&bytes);
        number += 1;
        sent.store(number * CHUNK as u64, Ordering::Relaxed);
        thread::sleep(PACE);
    }
    stream.shutdown(Shutdown::Write)?;
    // The guest ends the connection when it has everything.
    stream.read_to_end(&mut Vec::new())?;
    Ok(hex(&digest.finalize()))
}

/// Receives equal chunks up to the end. Returns their number.
fn receive(mut stream: TcpStream, received: &AtomicU64) -> io::Result<u64> {
    let (mut first, mut chunk) = (vec![0; CHUNK], vec![0; CHUNK]);
    stream.read_exact(&mut first)?;
    let mut number = 1;
    loop {
        received.store(number * CHUNK as u64, Ordering::Relaxed);
        match stream.read(&mut chunk[..1])? {
            0 => return Ok(number),
            _ => stream.read_exact(&mut chunk[1..])?,
        }
        assert!(chunk == first, "chunk {number} differs");
        number += 1;
    }
}

impl Traffic {
    fn start(guest: &Machine) -> Traffic {
        let listener = || TcpListener::bind((HOST, 0)).expect("a listener");
        let (down, up) = (listener(), listener());
        let port = |listener: &TcpListener| listener.local_addr().expect("an address").port();
        let ports = (port(&down), port(&up));
        let (sent, received, stop) = <(Arc<AtomicU64>, Arc<AtomicU64>, Arc<AtomicBool>)>::default();
        let accept = |listener: TcpListener| {
            let (stream, _) = listener.accept().expect("a connection of the guest");
            for limit in [TcpStream::set_read_timeout, TcpStream::set_write_timeout] {
                limit(&stream, Some(2 * STEP)).expect("a deadline");
            }
            stream
        };
        let (of_sender, stopped) = (Arc::clone(&sent), Arc::clone(&stop));
        let sender = thread::spawn(move || {
            let stream = accept(down);
            // What is in the buffer counts as sent. By default it has room for all that is waited for.
            set_socket_send_buffer_size(&stream, CHUNK).expect("a buffer");
            send(stream, &of_sender, &stopped).expect("a connection that lasts")
        });
        let of_receiver = Arc::clone(&received);
        let receiver = thread::spawn(move || {
            receive(accept(up), &of_receiver).expect("a connection that lasts")
        });
        guest.sh(&format!(
            "$B dd if=/bin/busybox of=/chunk bs={CHUNK} count=1 2>/dev/null"
        ));
        guest.spawn(&format!(
            "$B nc {HOST} {} </dev/null | $B sha256sum >/sum; $B touch /sum.done",
            ports.0
        ));
        guest.spawn(&format!(
            "(n=0; while [ ! -e /stop ]; do $B cat /chunk /chunk /chunk /chunk; n=$((n+4)); $B usleep 16000; done; \
              echo $n >/number) | $B nc {HOST} {}; $B touch /number.done",
            ports.1
        ));
        let traffic = Traffic {
            sent,
            received,
            stop,
            sender,
            receiver,
        };
        traffic.wait_for_more();
        traffic
    }

    /// Waits until bytes have passed in both directions.
    fn wait_for_more(&self) {
        for (what, counter) in [
            ("to the guest", &self.sent),
            ("of the guest", &self.received),
        ] {
            let before = counter.load(Ordering::Relaxed);
            wait_for(what, || {
                let more = counter.load(Ordering::Relaxed) >= before + ENOUGH;
                (more || self.sender.is_finished() || self.receiver.is_finished()).then_some(())
            });
        }
    }

    /// Ends both connections and compares what has passed.
    fn finish(self, guest: &Machine) {
        self.stop.store(true, Ordering::Relaxed);
        guest.sh("$B touch /stop");
        let expected = self.sender.join().expect("the sender");
        let number = self.receiver.join().expect("the receiver");
        let file = |name: &str| {
            wait_for(name, || {
                let script = format!("[ -e /{name}.done ] && $B cat /{name}");
                Some(guest.sh(&script)).filter(|text| !text.is_empty())
            })
        };
        let sum = file("sum");
        assert_eq!(sum.split_whitespace().next(), Some(&*expected));
        assert_eq!(file("number").trim(), number.to_string());
    }
}

/// A guest moves from one back-end to another while bytes pass in both directions.
fn migrate(
    release: &str,
    properties: &str,
    first: fn(&BridgedNamespace, &str) -> Daemon,
    second: fn(&BridgedNamespace) -> Daemon,
    check: fn(&Daemon),
) -> Result<(), Skipped> {
    let lab = BridgedNamespace::new(release)?;
    let (first, second) = (first(&lab, "first"), second(&lab));
    let mut source = lab.boot("first", properties);
    let traffic = Traffic::start(&source);
    let destination = lab.start("destination", "second", properties, true);
    source.monitor.migrate(&lab.path("incoming"));
    traffic.wait_for_more();
    traffic.finish(&destination);
    destination.ping();
    check(&second);
    drop(source);
    drop(destination);
    first.stop();
    let log = second.log.clone();
    second.stop();
    let counters = log.wait_for("announcements=", STEP);
    assert!(counters.is_some(), "{}", log.tail(5));
    // A guest that announces itself has its back-end send nothing.
    let has_sent = (1..10).any(|count| log.contains(&format!("announcements={count}")));
    assert_eq!(has_sent, !properties.is_empty(), "{}", log.tail(5));
    Ok(())
}

/// A back-end is killed under traffic, and another one takes its place.
fn replace() -> Result<(), Skipped> {
    let lab = BridgedNamespace::new("6.12")?;
    let mut daemon = lab.tap("first");
    let guest = lab.boot("first", "");
    let traffic = Traffic::start(&guest);
    for _ in 0..2 {
        drop(daemon);
        daemon = lab.tap("first");
        traffic.wait_for_more();
    }
    traffic.finish(&guest);
    guest.ping();
    drop(guest);
    daemon.stop();
    Ok(())
}
