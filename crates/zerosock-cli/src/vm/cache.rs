//! Cache of downloaded packages.
//!
//! Debian's packages come with `apt-get download` and are unpacked with `dpkg-deb -x`: no
//! installation, so no root is needed. A package is unpacked once, into a directory with its
//! name that appears complete or not at all.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::error::ImageError;

/// A directory for what is downloaded or made once.
#[derive(Clone, Debug)]
pub struct Cache(PathBuf);

impl Cache {
    /// `$ZEROSOCK_CACHE`; else `.cache/zerosock` of the checkout around the current directory;
    /// else `$XDG_CACHE_HOME/zerosock` or `~/.cache/zerosock`.
    pub fn find() -> Cache {
        if let Some(path) = std::env::var_os("ZEROSOCK_CACHE") {
            return Cache(path.into());
        }
        let here = std::env::current_dir().unwrap_or_default();
        let checkout = here
            .ancestors()
            .find(|dir| dir.join("crates/zerosock-cli").is_dir());
        if let Some(checkout) = checkout {
            return Cache(checkout.join(".cache/zerosock"));
        }
        let base = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
        Cache(base.unwrap_or_else(std::env::temp_dir).join("zerosock"))
    }

    /// The directory into which Debian's `package` is unpacked; downloads it if missing.
    ///
    /// # Errors
    /// See [`ImageError`]; the text ends in the command that fixes it.
    pub fn package(&self, package: &str) -> Result<PathBuf, ImageError> {
        let target = self.0.join("packages").join(package);
        if target.is_dir() {
            return Ok(target);
        }
        let failed = |what: String, fix: &str| ImageError::Package {
            package: package.to_owned(),
            what,
            fix: fix.to_owned(),
        };
        let staging = self
            .0
            .join(format!("packages/.{package}.{}", std::process::id()));
        let cache = |source| ImageError::Cache {
            path: staging.clone(),
            source,
        };
        fs::create_dir_all(&staging).map_err(cache)?;
        // Removed on every return; after the rename there is nothing to remove.
        let _cleanup = RemoveOnDrop(&staging);

        eprintln!("fetching {package} with apt-get download");
        let mut apt = Command::new("apt-get");
        apt.args(["download", "-q", package]).current_dir(&staging);
        run(&mut apt).map_err(|what| failed(what, "sudo apt-get update"))?;
        let deb = fs::read_dir(&staging)
            .map_err(cache)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|ext| ext == "deb"))
            .ok_or_else(|| failed("nothing was downloaded".into(), "sudo apt-get update"))?;
        let unpacked = staging.join("unpacked");
        run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&unpacked))
            .map_err(|what| failed(what, "sudo apt-get install dpkg"))?;
        match fs::rename(&unpacked, &target) {
            // Another process was faster; its copy is identical.
            Err(_) if target.is_dir() => Ok(target),
            other => other.map(|()| target.clone()).map_err(cache),
        }
    }

    /// The first dependency of `package`, for metapackages.
    ///
    /// # Errors
    /// As [`Cache::package`].
    pub fn depends(&self, package: &str, prefix: &str) -> Result<String, ImageError> {
        let failed = |what: String| ImageError::Package {
            package: package.to_owned(),
            what,
            fix: "sudo apt-get update".to_owned(),
        };
        let known = self.0.join("packages").join(format!("{package}.is"));
        // It is empty while another process writes it.
        if let Ok(name) = fs::read_to_string(&known)
            && !name.is_empty()
            && self.0.join("packages").join(&name).is_dir()
        {
            return Ok(name);
        }
        let output = run(Command::new("apt-cache").args(["depends", package])).map_err(failed)?;
        let name = String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .find(|name| name.starts_with(prefix))
            .map(str::to_owned)
            .ok_or_else(|| failed("not among the packages that apt knows".into()))?;
        let cache = |source| ImageError::Cache {
            path: known.clone(),
            source,
        };
        fs::create_dir_all(self.0.join("packages")).map_err(cache)?;
        fs::write(&known, &name).map_err(cache)?;
        Ok(name)
    }
}

struct RemoveOnDrop<'p>(&'p Path);

impl Drop for RemoveOnDrop<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.0);
    }
}

fn run(command: &mut Command) -> Result<Output, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said
        .lines()
        .rfind(|line| !line.trim().is_empty())
        .unwrap_or("no reason given");
    Err(format!("{name}: {last}"))
}
