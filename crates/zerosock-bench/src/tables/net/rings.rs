//! The rings alone: a driver and a device, one core each, both polling. The driver sends frames, and
//! receives them again from the same device, or from a second one behind it.

use std::fs;
use std::hint::black_box;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use zerosock_net::interface::{Interface, InterfaceConfig, LoanError, ReceivedFrame, Repr};
use zerosock_net::server::{GuestConfig, Server};
use zerosock_net::tap::TapBackend;
use zerosock_sys::account::Limits;

use super::daemon::{START, spawn_logged, start, watched};
use super::echo::Echo;
use crate::args::Settings;
use crate::bench::Bench;
use crate::binary::Binary;
use crate::image::short_dir;
use crate::pair::Cores;
use crate::peers::dpdk;
use crate::peers::trust::trust;
use crate::processes::on_core;
use crate::report::line;

/// Frames of a burst, and frames in flight at most: as in `dpdk.c`.
const BURST: usize = 32;
const WINDOW: usize = 192;
/// Frames of which none arrives for this long are lost.
const LOST: Duration = Duration::from_millis(10);
/// Bytes of the addresses of a frame.
const ADDRESSES: usize = 12;

/// The way of the frames.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Course {
    /// The device copies a frame, and returns it.
    Back,
    /// The frame goes to a second device, with a driver in the same thread as the first one: by
    /// zerosock's switch, or DPDK's second port.
    Across,
}

impl Course {
    fn sockets(self, dir: &Path) -> Vec<PathBuf> {
        let names: &[&str] = match self {
            Course::Back => &["a"],
            Course::Across => &["a", "b"],
        };
        names.iter().map(|name| dir.join(name)).collect()
    }
}

/// The two contestants.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Rings {
    Zerosock,
    Dpdk,
}

/// zerosock first, then its peer.
pub(super) const RINGS: [Rings; 2] = [Rings::Zerosock, Rings::Dpdk];

impl Rings {
    /// Name in the tables.
    pub(super) fn title(self) -> String {
        match self {
            Rings::Zerosock => "zerosock".to_owned(),
            Rings::Dpdk => format!("{} virtio_user, vhost", dpdk::title()),
        }
    }

    /// Millions of frames of `size` bytes a second that arrive.
    pub(super) fn measure(
        self,
        course: Course,
        size: usize,
        bench: &Bench<'_>,
    ) -> Result<f64, String> {
        let (settings, cores) = (bench.settings, bench.cores);
        if cores.receiver.is_none() {
            return Err("two cores are needed: both sides poll".to_owned());
        }
        match self {
            Rings::Zerosock => ours(course, size, settings, cores),
            Rings::Dpdk => peers(course, size, settings, cores),
        }
    }
}

/// The device is in this process, on the receiver's core; the driver on the sender's.
fn ours(course: Course, size: usize, settings: &Settings, cores: Cores) -> Result<f64, String> {
    let dir = short_dir()?;
    let paths = course.sockets(dir.path());
    // The threads of the server are where the one is that starts it.
    let server = on_core(cores.receiver, || serve(course, &paths))?;
    let (warm, time) = (settings.warm, settings.time);
    let result = on_core(cores.sender, || {
        let config = InterfaceConfig {
            trust: trust(),
            ..InterfaceConfig::default()
        };
        let connect = |path: &PathBuf| Interface::connect(path, &config).map_err(line);
        let ports = paths.iter().map(connect).collect::<Result<Vec<_>, _>>()?;
        let (Some(first), Some(last)) = (ports.first(), ports.last()) else {
            return Err("no device".to_owned());
        };
        generate(first, last, size, warm, time)
    });
    server.shutdown();
    result
}

/// A guest at this socket, without limits that matter.
pub(crate) fn guest(path: &Path) -> io::Result<GuestConfig> {
    Ok(GuestConfig {
        name: path.display().to_string(),
        listener: UnixListener::bind(path)?,
        mac: None,
        mac_filter: false,
        mtu: None,
        sealed_memory: true,
        limits: Limits {
            descriptors: 256,
            numbers: 512,
            mapped: 1 << 30,
            mapped_each: 1 << 30,
        },
    })
}

fn serve(course: Course, sockets: &[PathBuf]) -> Result<Server, String> {
    let mut guests = sockets
        .iter()
        .map(|path| guest(path).map_err(line))
        .collect::<Result<Vec<_>, String>>()?;
    // Longer than any pause of the driver.
    let spin = Duration::from_secs(1);
    let server = match (course, guests.pop()) {
        (Course::Back, Some(only)) => Server::start(only, Echo::new(), spin),
        (_, last) => {
            guests.extend(last);
            Server::start_switch(guests, None::<(String, TapBackend)>, spin)
        }
    };
    server.map_err(line)
}

/// Sends frames by `from`, and receives them from `to`.
fn generate(
    from: &Interface,
    to: &Interface,
    size: usize,
    warm: Duration,
    time: Duration,
) -> Result<f64, String> {
    let addresses = [to.mac().0, from.mac().0].concat();
    let mut last = Instant::now();
    let (mut limit, mut give_up) = (last, last + START);
    // The end of the warm-up, which begins with the first frame that arrives.
    let mut begin = None;
    let (mut in_flight, mut arrived, mut sum) = (0_usize, 0_u64, 0_u64);
    loop {
        let mut count = 0;
        while count < BURST {
            let Some(frame) = to.recv() else { break };
            sum = sum.wrapping_add(read(&frame)?);
            count += 1;
        }
        let now = Instant::now();
        if count > 0 {
            in_flight = in_flight.saturating_sub(count);
            last = now;
            match begin {
                None => {
                    begin = Some(now + warm);
                    limit = now + warm + time;
                    give_up = limit + START;
                }
                Some(begin) if now >= begin => arrived += count as u64,
                Some(_) => {}
            }
        } else if now - last > LOST {
            in_flight = 0;
            last = now;
            // An interface that has failed returns no frames.
            if let Some(failure) = to.failure() {
                return Err(line(failure));
            }
        }
        if arrived > 0 && now >= limit || now >= give_up {
            let begin = begin
                .filter(|_| arrived > 0)
                .ok_or("no frame came back in 20 s")?;
            black_box(sum);
            return Ok(arrived as f64 / 1e6 / (now - begin).as_secs_f64());
        }
        in_flight += send(from, &addresses, size, WINDOW - in_flight)?;
    }
}

/// Sends new frames, at most `room`; returns how many.
fn send(from: &Interface, addresses: &[u8], size: usize, room: usize) -> Result<usize, String> {
    let mut count = 0;
    while count < room.min(BURST) {
        let mut loan = match from.loan(size) {
            Ok(loan) => loan,
            Err(LoanError::Full) => break,
            Err(error) => return Err(line(error)),
        };
        let bytes = loan.bytes_mut().ok_or("no trust")?;
        bytes[ADDRESSES..].fill(count as u8);
        bytes[..ADDRESSES].copy_from_slice(addresses);
        loan.queue(&Repr::PLAIN).map_err(line)?;
        count += 1;
    }
    from.flush();
    Ok(count)
}

/// The sum of the words of a frame: its receiver reads all of them.
fn read(frame: &ReceivedFrame<'_>) -> Result<u64, String> {
    let bytes = frame.bytes().ok_or("a frame in several buffers")?;
    let (words, _) = bytes.as_chunks::<8>();
    let words = words.iter().map(|word| u64::from_ne_bytes(*word));
    Ok(words.fold(0, u64::wrapping_add))
}

/// The same by DPDK: the device, and the driver, are processes.
fn peers(course: Course, size: usize, settings: &Settings, cores: Cores) -> Result<f64, String> {
    let dir = short_dir()?;
    let sockets = course.sockets(dir.path());
    let devices = |format: &dyn Fn(usize, &Path) -> String| -> Vec<String> {
        let sockets = sockets.iter().enumerate();
        sockets.map(|(at, socket)| format(at, socket)).collect()
    };
    let vhost = devices(&|at, socket| format!("net_vhost{at},iface={},queues=1", socket.display()));
    let user = devices(&|at, socket| format!("virtio_user{at},path={},queues=1", socket.display()));
    let words = match course {
        Course::Back => "echo".to_owned(),
        Course::Across => "forward".to_owned(),
    };
    let mut device = command("device", cores.receiver, &vhost, &words)?;
    let _device = start(&mut device, || sockets.iter().all(|socket| socket.exists()))?;
    let (warm, time) = (settings.warm.as_millis(), settings.time.as_millis());
    let words = format!("generate {size} {warm} {time}");
    let mut driver = command("driver", cores.sender, &user, &words)?;
    let (mut process, log) = spawn_logged(&mut driver)?;
    // It ends by itself after a start that takes too long.
    let status = process.wait(2 * START + settings.time);
    let said = log.wait_for("frames ", Duration::from_secs(1));
    let rate = said.as_deref().and_then(rate);
    rate.ok_or_else(|| line(format!("it ended with {status:?}: {}", log.tail(3))))
}

fn command(
    name: &str,
    cpu: Option<usize>,
    devices: &[String],
    words: &str,
) -> Result<Command, String> {
    let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
    let (program, arguments) = dpdk::command(name, cpu, &devices)?;
    let mut command = watched(&program)?;
    command.args(arguments).args(words.split(' '));
    Ok(command)
}

/// As [`Rings::measure`], by the `zerosock-bench` of a release with both sides in it, on its first two cores.
pub(super) fn measure_in(binary: Binary, case: &str, settings: &Settings) -> Result<f64, String> {
    let dir = short_dir()?;
    let file = dir.path().join("figures");
    let mut command = watched(&binary.path()?)?;
    command.args(["net", "--case", case, "--rounds", "1"]);
    command.arg("--json").arg(&file);
    command.args(settings.quick.then_some("--quick"));
    let (mut process, log) = spawn_logged(&mut command)?;
    let status = process.wait(2 * START + settings.time);
    let figures = fs::read_to_string(file).unwrap_or_default();
    let figures = serde_json::from_str::<serde_json::Value>(&figures).unwrap_or_default();
    let figure = figures["rows"][0]["ours"].as_f64();
    figure.ok_or_else(|| {
        let end = status.map_or("it does not end".to_owned(), |status| status.to_string());
        line(format!("{end}: {}", log.tail(5)))
    })
}

/// Millions of frames a second, of `frames N nanoseconds N ...`.
fn rate(line: &str) -> Option<f64> {
    let mut words = line.split(' ');
    let mut number = |name: &str| {
        words.next().filter(|word| *word == name)?;
        words.next()?.parse::<f64>().ok()
    };
    Some(number("frames")? * 1e3 / number("nanoseconds")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_in_millions_of_frames_a_second() {
        assert_eq!(rate("frames 500 nanoseconds 1000000 sum 7"), Some(0.5));
        assert_eq!(rate("frames none"), None);
    }
}
