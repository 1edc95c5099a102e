//! A kernel to boot and the modules that belong to it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cache::Cache;
use super::error::ImageError;

/// A kernel image with its modules.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The image (a vmlinuz, or the program of user-mode Linux).
    pub image: PathBuf,
    /// The directory `/lib/modules/<release>`.
    pub modules: PathBuf,
    /// Its release, as `uname -r` prints it.
    pub release: String,
}

impl Kernel {
    /// Debian's kernel for clouds behind a metapackage, such as `linux-image-cloud-amd64` (6.1 in
    /// Debian 12) or `linux-image-6.12-cloud-amd64`.
    ///
    /// # Errors
    /// When it is neither cached nor downloadable.
    pub fn debian(cache: &Cache, meta_package: &str) -> Result<Kernel, ImageError> {
        let package = cache.depends(meta_package, "linux-image-")?;
        let root = cache.package(&package)?;
        let release = package.trim_start_matches("linux-image-").to_owned();
        let image = root.join("boot").join(format!("vmlinuz-{release}"));
        let modules = root.join("lib/modules").join(&release);
        if !image.is_file() || !modules.is_dir() {
            return Err(ImageError::Empty(root));
        }
        Ok(Kernel {
            image,
            modules,
            release,
        })
    }

    /// The user's own image; modules from `modules` or `/lib/modules/<release>`.
    ///
    /// # Errors
    /// When it is no boot image or its modules are not there.
    pub fn custom(image: &Path, modules: Option<&Path>) -> Result<Kernel, ImageError> {
        let release = release_of(image)?;
        let modules =
            modules.map_or_else(|| Path::new("/lib/modules").join(&release), Path::to_owned);
        if !modules.join("kernel").is_dir() {
            return Err(ImageError::Modules(modules, release));
        }
        Ok(Kernel {
            image: image.to_owned(),
            modules,
            release,
        })
    }

    /// Returns the module's file, unpacked; `None` when the kernel has it built in.
    ///
    /// # Errors
    /// When a file cannot be read or unpacked.
    pub fn module(&self, name: &str) -> Result<Option<Vec<u8>>, ImageError> {
        let Some(path) = find(&self.modules.join("kernel"), name) else {
            return Ok(None);
        };
        let tool = match path.extension().and_then(|ext| ext.to_str()) {
            Some("xz") => "xz",
            Some("zst") => "zstd",
            Some("gz") => "gzip",
            _ => {
                return fs::read(&path)
                    .map(Some)
                    .map_err(|e| ImageError::Read(path, e));
            }
        };
        let failed = |what| ImageError::Unpack {
            path: path.clone(),
            tool,
            what,
        };
        let output = Command::new(tool)
            .arg("-dc")
            .arg(&path)
            .output()
            .map_err(|e| failed(e.to_string()))?;
        if !output.status.success() {
            return Err(failed(
                String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            ));
        }
        Ok(Some(output.stdout))
    }
}

/// Finds `name.ko`, compressed or not, anywhere below `dir`; `-` and `_` are equal.
fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    let mut below = Vec::new();
    for entry in fs::read_dir(dir).ok()?.flatten() {
        let file = entry.file_name().to_string_lossy().replace('-', "_");
        if file
            .strip_prefix(name)
            .is_some_and(|rest| rest == ".ko" || rest.starts_with(".ko."))
        {
            return Some(entry.path());
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            below.push(entry.path());
        }
    }
    below.iter().find_map(|dir| find(dir, name))
}

/// The release in the header of a bzImage: at 0x20e lies the offset, less 0x200, of the version
/// text (Documentation/arch/x86/boot.rst of the kernel).
fn release_of(image: &Path) -> Result<String, ImageError> {
    let bytes = fs::read(image).map_err(|error| ImageError::Read(image.to_owned(), error))?;
    let version = || {
        if bytes.get(0x202..0x206)? != b"HdrS" {
            return None;
        }
        let offset = u16::from_le_bytes(bytes.get(0x20e..0x210)?.try_into().ok()?);
        let text = bytes.get(usize::from(offset) + 0x200..)?;
        let end = text.iter().position(|byte| matches!(byte, b' ' | 0))?;
        String::from_utf8(text[..end].to_vec()).ok()
    };
    version().ok_or_else(|| ImageError::Kernel(image.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_is_read_from_the_boot_header() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vmlinuz");
        let mut image = vec![0; 0x400];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x20e..0x210].copy_from_slice(&0x100u16.to_le_bytes());
        image[0x300..0x30e].copy_from_slice(b"6.1.0-x (me) #");
        fs::write(&path, &image).unwrap();
        assert_eq!(release_of(&path).unwrap(), "6.1.0-x");
        fs::write(&path, b"text").unwrap();
        assert!(matches!(release_of(&path), Err(ImageError::Kernel(_))));
    }

    #[test]
    fn modules_are_found_whatever_their_spelling() {
        let dir = tempfile::tempdir().unwrap();
        let sub = dir.path().join("kernel/net");
        fs::create_dir_all(&sub).unwrap();
        fs::write(sub.join("virtio-rng.ko"), b"x").unwrap();
        fs::write(sub.join("vsock_diag.ko"), b"y").unwrap();
        assert!(find(dir.path(), "virtio_rng").is_some());
        assert!(find(dir.path(), "vsock").is_none());
    }
}
