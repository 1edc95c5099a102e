//! Our device and its peer, side by side, without a virtual machine.
//!
//! The guest of each device in turn is our own driver half on a memfd, so that
//! both do the same work for the same driver; a Unix socket is source or sink
//! on the host's side. Each device runs as a child process of its own, started
//! afresh for every measurement, rounds alternating between devices. What is
//! compared is the CPU time of the device's process for each gigabyte, with
//! throughput beside it. Every byte is compared at its receiver.
//!
//! `cargo bench -p zerosock-cli --bench device -- --help` says the rest.

mod bare;
mod device;
mod run;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgAction, Parser};

use crate::device::Device;
use crate::run::{Direction, Figures};

/// Compare the device CPU time per gigabyte of `zerosock serve` and vhost-device-vsock
#[derive(Debug, Parser)]
#[command(name = "device")]
struct Args {
    /// Measurements of each case and device
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Bytes for each measurement, in percent of the usual
    #[arg(long, default_value_t = 100)]
    scale: u64,
    /// Packet sizes in bytes
    #[arg(long, value_delimiter = ',', default_values_t = [64, 4096, 65536])]
    sizes: Vec<usize>,
    /// Payload bytes of each of the driver's receive buffers; Linux guests post 4096
    #[arg(long, default_value_t = 4096)]
    rx_buffer: u32,
    /// Entries of each virtqueue
    #[arg(long, default_value_t = 256)]
    queue_size: u16,
    /// One direction only: to-host or to-guest
    #[arg(long)]
    direction: Option<Direction>,
    /// One device only: zerosock or vhost-device-vsock
    #[arg(long)]
    only: Option<String>,
    /// No runs that count system calls
    #[arg(long)]
    no_syscalls: bool,
    /// Install the peer with `cargo install` into .cache/peers first, if it is not there
    #[arg(long)]
    install_peers: bool,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
    /// No measurement of the bare socket
    #[arg(long)]
    no_floor: bool,
    /// Be the child that measures the bare socket
    #[arg(long, hide = true, requires_all = ["bare_socket", "bare_bytes"])]
    bare: Option<Direction>,
    #[arg(long, hide = true)]
    bare_socket: Option<PathBuf>,
    #[arg(long, hide = true)]
    bare_bytes: Option<u64>,
    /// Given by `cargo bench`; means nothing
    #[arg(long, action = ArgAction::SetTrue, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match bench(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("device: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bench(args: &Args) -> Result<(), String> {
    if let (Some(direction), Some(socket), Some(bytes)) =
        (args.bare, &args.bare_socket, args.bare_bytes)
    {
        return bare::child(direction, socket, bytes);
    }
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    if args.install_peers {
        device::install_peer(&root)?;
    }
    let mut devices = Vec::new();
    for (device, found) in device::all(&root) {
        if args.only.as_ref().is_some_and(|only| *only != device.name) {
            continue;
        }
        if found {
            devices.push(device);
        } else {
            eprintln!("missing: {} (--install-peers installs it)", device.name);
        }
    }
    if devices.is_empty() {
        return Err("no device to measure".to_owned());
    }
    let mut rows = Vec::new();
    for direction in [Direction::ToHost, Direction::ToGuest] {
        if args.direction.is_some_and(|only| only != direction) {
            continue;
        }
        for &size in &args.sizes {
            let case = run::Case {
                direction,
                size,
                bytes: usual_bytes(size) * args.scale / 100,
                rx_buffer: args.rx_buffer,
                queue_size: args.queue_size,
            };
            rows.push(measure(args, &devices, &case)?);
        }
    }
    if args.json {
        println!("{}", table::json(&rows));
    } else {
        print!("{}", table::text(&rows, args.rounds));
    }
    Ok(())
}

/// Enough for a second or so of the slower device, and for a CPU time that
/// the kernel's clock ticks of 10 ms do not blur.
fn usual_bytes(size: usize) -> u64 {
    match size {
        0..=512 => 48 << 20,
        513..=1500 => 128 << 20,
        _ => 768 << 20,
    }
}

fn measure(args: &Args, devices: &[Device], case: &run::Case) -> Result<table::Row, String> {
    let mut floor: Vec<Figures> = Vec::new();
    let mut figures: Vec<Vec<Figures>> = devices.iter().map(|_| Vec::new()).collect();
    for round in 0..args.rounds {
        // Who goes first takes turns as well.
        for step in 0..devices.len() {
            let which = (round + step) % devices.len();
            eprintln!("{case}: round {}, {}", round + 1, devices[which].name);
            let one = run::once(&devices[which], case, false)
                .map_err(|error| format!("{case}, {}: {error}", devices[which].name))?;
            figures[which].push(one);
        }
        if !args.no_floor {
            floor.push(bare::once(case).map_err(|error| format!("{case}, bare: {error}"))?);
        }
    }
    let mut columns = Vec::new();
    for (device, figures) in devices.iter().zip(figures) {
        let syscalls = if args.no_syscalls {
            None
        } else {
            eprintln!("{case}: counting system calls, {}", device.name);
            run::once(device, case, true)
                .map_err(|error| format!("{case}, {}: {error}", device.name))?
                .syscalls
                .map(|(calls, how)| (calls as f64 / (case.bytes as f64 / 1e6), how))
        };
        columns.push(table::Column::new(device.name, &figures, syscalls));
    }
    if !floor.is_empty() {
        columns.push(table::Column::new("bare socket", &floor, None));
    }
    Ok(table::Row {
        case: case.to_string(),
        columns,
    })
}
