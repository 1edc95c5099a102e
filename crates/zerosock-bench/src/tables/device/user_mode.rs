//! A stock guest under user-mode Linux behind each device: round trips to a program in it that echoes.

use std::io::{Read, Write};
use std::time::Duration;

use zerosock_cli::vm::hybrid;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::uml;

use super::program::{self, Device, OURS};
use super::traffic;
use crate::args::Settings;
use crate::bench::Bench;
use crate::image::{Image, short_dir};
use crate::pair::Cores;
use crate::processes::{on_core, own_program, starting_on};
use crate::report::{Outcomes, line};
use crate::worker::order::Outcome;

const PORT: u32 = 1234;
/// Timeout of each step of the guest.
const STEP: Duration = Duration::from_secs(60);

/// Measures all devices. `None`: there is no guest, for the reason that is noted.
pub(super) fn measure(bench: &mut Bench<'_>, name: &str) -> Option<Outcomes<Outcome>> {
    let missing = "run as root: apt-get install user-mode-linux".to_owned();
    let kernel = uml::kernel().ok_or(missing);
    let image = kernel.and_then(|kernel| Image::new(kernel, uml::TTY, &[], |_, _| Ok(())));
    let image = match image {
        Ok(image) => image,
        Err(reason) => {
            bench.table.note_missing("user-mode Linux", &reason);
            return None;
        }
    };
    let contestants = [
        (OURS.to_owned(), program::ours()),
        (program::peer_title(), program::peer()),
    ];
    let contestants = bench.wanted_with(contestants, program::release);
    let cores = bench.placed_cores();
    Some(bench.measure(name, &contestants, |device| {
        let device = device.as_ref().map_err(Clone::clone)?;
        // The guest ends with the thread that starts it: that of the program on the host.
        on_core(cores.host, || {
            round_trips(&image, device, bench.settings, cores)
        })
    }))
}

/// Boots a guest behind a fresh device, each on its core if placed, and connects to it.
fn round_trips(
    image: &Image,
    device: &Device,
    settings: &Settings,
    cores: Cores,
) -> Result<Outcome, String> {
    let dir = short_dir()?;
    let running = device.start(dir.path(), cores.receiver)?;
    let machine = uml::device(&running.socket, uml::VSOCK);
    let (kernel, own) = (&image.kernel, own_program()?);
    let boot = || uml::Guest::boot(kernel, &image.initramfs, &machine, &own, None);
    let guest = starting_on(cores.sender, boot)?.map_err(line)?;
    let listener = guest.remote.socket(Command::Listen { port: PORT }, STEP);
    let socket = listener.map_err(line)?;
    let _echo = guest.remote.start(Command::Echo { socket });
    let (mut stream, _) = hybrid::connect(&running.uds_path, PORT, STEP).map_err(line)?;
    stream.set_read_timeout(Some(STEP)).map_err(line)?;
    traffic::time_round_trips(settings.warm, settings.time, |sent, back| {
        let answered = stream
            .write_all(sent)
            .and_then(|()| stream.read_exact(back));
        answered.map_err(line)
    })
}
