//! What an agent, and a client that does not behave, do with huge pages, in single steps.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use clap::Subcommand;
use rustix::process::{Signal, getpid, kill_process};
use zerosock::guest::agent::keeper::{Keeper, KeeperEntry};
use zerosock::guest::key::Nonce;
use zerosock::guest::page_value::{PAGE, write_values};
use zerosock::guest::wire::AttachmentId;
use zerosock_ring::Memory;
use zerosock_sys::hugetlbfs::{HUGE_PAGE, HugeDir, HugeMapping};
use zerosock_sys::pagemap;
use zerosock_sys::pin::Pin;

const MOUNT: &str = "/run/huge";
const KEEPER: &str = "/run/keeper.sock";
/// The only attachment and its file.
const ID: AttachmentId = AttachmentId([7; 16]);
const NAME: &str = "pages";

#[derive(Debug, Subcommand)]
pub(super) enum Step {
    /// Pins the pages of a new file by a keeper, writes their values, prints their extents, and gets SIGKILL
    Register {
        #[arg(long)]
        pages: u64,
        /// Every byte of the nonce
        #[arg(long)]
        nonce: u8,
    },
    /// As a client: frees the pages of the file, and removes it
    Free,
    /// Takes so many pages, and writes ones into them
    Take {
        #[arg(long)]
        pages: u64,
    },
    /// As the next agent: unpins the pages
    Unpin,
    /// Pins pages and prints where they lie
    Find {
        #[arg(long, default_value = "1")]
        pages: u64,
    },
}

pub(super) fn run(step: Step) -> io::Result<()> {
    match step {
        Step::Register { pages, nonce } => {
            let file = dir()?.create(NAME, pages * HUGE_PAGE).map_err(other)?;
            let extents = keeper()?.pin(ID, &file).map_err(other)?;
            let values = write_values(
                &map(&file)?,
                &Nonce([nonce; 32]),
                0..pages * (HUGE_PAGE / PAGE),
            );
            assert_eq!(values, None);
            let mut out = io::stdout();
            for extent in extents {
                writeln!(out, "{} {}", extent.addr, extent.len)?;
            }
            out.flush()?;
            Ok(kill_process(getpid(), Signal::KILL)?)
        }
        Step::Free => {
            let path = Path::new(MOUNT).join(NAME);
            File::options().write(true).open(path)?.set_len(0)?;
            dir()?.remove(NAME)
        }
        Step::Take { pages } => {
            let dir = dir()?;
            let file = dir.create("other", pages * HUGE_PAGE).map_err(other)?;
            let memory = map(&file)?;
            for page in 0..pages * (HUGE_PAGE / PAGE) {
                let mut pieces = Vec::new();
                memory
                    .translate(page * PAGE, PAGE as u32, &mut pieces)
                    .map_err(other)?;
                memory.write(&pieces, 0, &[0xff; PAGE as usize]);
            }
            dir.remove("other")
        }
        Step::Unpin => keeper()?.unpin(ID).map_err(other),
        Step::Find { pages } => {
            let file = zerosock_sys::memfd::create_huge("page", pages * HUGE_PAGE)?;
            let mapping = HugeMapping::new(&file).map_err(other)?;
            let pin = Pin::new(&mapping).map_err(other)?;
            let extents = pagemap::extents(&mapping, &pin).map_err(other)?;
            println!("{extents:?}");
            Ok(())
        }
    }
}

fn other(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::other(error)
}

fn dir() -> io::Result<HugeDir> {
    HugeDir::open(Path::new(MOUNT)).map_err(other)
}

fn keeper() -> io::Result<Keeper> {
    Keeper::find_or_start(Path::new(KEEPER), KeeperEntry::enter()).map_err(other)
}

pub(super) fn map(file: &OwnedFd) -> io::Result<Memory> {
    let len = rustix::fs::fstat(file)?.st_size as u64;
    Memory::of_file(file, len).map_err(other)
}
