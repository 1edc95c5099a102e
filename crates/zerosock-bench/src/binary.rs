//! The programs of zerosock that take part: this one, and those of releases before it.

use std::path::Path;

use crate::processes::own_program;

/// The first argument of a worker, before its order.
pub(crate) const WORKER: &str = "worker";

/// A program of zerosock.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Binary {
    /// `None`: this program.
    path: Option<&'static Path>,
    /// 0 is this program.
    pub(crate) number: u8,
}

impl Binary {
    /// This program.
    pub(crate) const OWN: Binary = Binary {
        path: None,
        number: 0,
    };

    /// Largest number of a program.
    pub(crate) const MOST: u8 = 4;

    /// The program at `path`, which is `zerosock` or `zerosock-bench` of another release. `number` is not 0.
    pub(crate) fn other(path: &'static Path, number: u8) -> Binary {
        let path = Some(path);
        Binary { path, number }
    }

    /// Its name in the tables.
    pub(crate) fn title(self) -> &'static str {
        self.path
            .map_or(Some("zerosock"), Path::to_str)
            .unwrap_or("another release")
    }

    /// Path of the program.
    pub(crate) fn path(self) -> Result<std::path::PathBuf, String> {
        self.path
            .map_or_else(own_program, |path| Ok(path.to_owned()))
    }

    /// Its first argument as a worker.
    pub(crate) fn worker(self) -> &'static str {
        // Until the benchmarks became a program of their own, they were a part of `zerosock`.
        match self.path.and_then(Path::file_name) {
            Some(name) if name == "zerosock" => "bench-worker",
            _ => WORKER,
        }
    }
}
