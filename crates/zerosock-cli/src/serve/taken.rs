//! The CIDs, paths and ports of one configuration, each with the option that names it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use zerosock::forward::{ForwardRule, ListenAddress};
use zerosock::{Cid, Port};

use super::attach::{Attach, Hybrid};
use super::derived::{self, PortBase, PortPath};
use super::forward::Listen;
use super::validate::{OptionSource, SettingsError, place_of, wrong};
use super::vm::{Host, Vm};
use crate::net::network::Network;

/// CIDs, paths and ports in use by the VMs so far, each with the option that names it.
#[derive(Default)]
pub(super) struct Taken {
    cids: HashMap<u32, String>,
    pub(super) paths: HashMap<PathBuf, String>,
    ports: HashMap<u32, String>,
    /// The paths of hybrid sockets, for those of ports.
    bases: Vec<PortBase>,
    /// Sockets of single ports.
    named: Vec<PortPath>,
}

impl Taken {
    pub(super) fn take(&mut self, source: OptionSource<'_>, vm: &Vm) -> Result<(), SettingsError> {
        let by = |key: &str| format!("{} of the VM with CID {}", source.option(key), vm.cid);
        let duplicate = |key: &str, value: String, other: String| SettingsError::Duplicate {
            option: source.option(key),
            value,
            other,
        };
        let monitor = format!("the VM at {}", vm.socket.display());
        if let Some(other) = self.cids.insert(vm.cid, monitor) {
            return Err(duplicate("guest-cid", vm.cid.to_string(), other));
        }
        self.take_path(source.option("socket"), &vm.socket, by("socket"))?;
        let base = |key: &str, path: &Path| PortBase {
            option: by(key),
            path: path.into(),
            is_template: false,
        };
        if let Host::Hybrid { path, messages } = &vm.host {
            self.bases.push(base("uds-path", path));
            let messages = messages.as_deref();
            let messages = messages.map(|path| base("uds-path-seqpacket", path));
            self.bases.extend(messages);
        }
        let mut take_path =
            |key: &str, path: &Path| self.take_path(source.option(key), path, by(key));
        match &vm.host {
            Host::Hybrid { path, messages } => {
                take_path("uds-path", path)?;
                match messages {
                    Some(path) => take_path("uds-path-seqpacket", path),
                    None => Ok(()),
                }
            }
            Host::Forward { listen, .. } => {
                let key = "forward-listen";
                listen
                    .iter()
                    .try_for_each(|&port| match self.ports.insert(port, by(key)) {
                        None => Ok(()),
                        Some(other) => Err(duplicate(key, port.to_string(), other)),
                    })
            }
        }
    }

    pub(super) fn take_attach(
        &mut self,
        source: OptionSource<'_>,
        attach: &Attach,
    ) -> Result<(), SettingsError> {
        let option = source.attach_option("socket");
        if let Some(hybrid) = &attach.hybrid {
            let by = source.attach_option("uds-path");
            let is_template = matches!(hybrid, Hybrid::Each(_));
            if is_template {
                // Each process has a socket there.
                let example = derived::example(hybrid.path());
                self.take_path(by.clone(), &example, by.clone())?;
            }
            self.bases.push(PortBase {
                option: by,
                path: hybrid.path().into(),
                is_template,
            });
        }
        self.take_path(option.clone(), &attach.socket, option)
    }

    /// Takes the socket of a single port of a VM.
    pub(super) fn take_port(
        &mut self,
        source: OptionSource<'_>,
        vm: &Vm,
        port: Port,
        path: &Path,
        rule: &ForwardRule,
    ) {
        let resolved = rule.to.path(Cid::new(vm.cid), port);
        let path = resolved.unwrap_or_else(|| path.into());
        let by = source.option("uds-path");
        self.named.push(PortPath {
            option: format!(
                "{by} {port}={} of the VM with CID {}",
                path.display(),
                vm.cid
            ),
            port,
            path,
        });
    }

    /// Refuses sockets of our own at the path of a guest's port.
    pub(super) fn check_derived(
        &self,
        file: Option<&Path>,
        listen: &[Listen],
    ) -> Result<(), SettingsError> {
        let place = place_of(file);
        let rules = listen.iter().enumerate().filter_map(|(index, listen)| {
            let path = match &listen.on {
                ListenAddress::Unix(path) | ListenAddress::UnixSeqpacket(path) => path.clone(),
                ListenAddress::Tcp(_) => return None,
            };
            Some((path, format!("{place}listen[{index}]: on")))
        });
        let taken = self.paths.iter();
        let taken = taken.map(|(path, by)| (path.clone(), by.clone()));
        let mut own: Vec<_> = taken.chain(rules).collect();
        // The same error for the same settings.
        own.sort();
        for (path, option) in own {
            let base = self.bases.iter().find_map(|base| {
                let port = base.port_of(&path)?;
                Some((format!("{} {}", base.option, base.path.display()), port))
            });
            let named = || {
                let named = self.named.iter().find(|named| named.matches(&path))?;
                Some((named.option.clone(), named.port.get()))
            };
            if let Some((by, port)) = base.or_else(named) {
                let fix = format!(
                    "this is port {port} of the host for {by}: the guest would reach this socket of \
                     zerosock; choose another path"
                );
                return Err(wrong(option, path.display(), fix));
            }
        }
        Ok(())
    }

    /// Checks a network of the file, and takes the sockets of its guests.
    pub(super) fn take_network(
        &mut self,
        file: Option<&Path>,
        index: usize,
        network: &Network,
    ) -> Result<(), SettingsError> {
        let place = file.unwrap_or(Path::new("")).display();
        let option = |key: &str| format!("{place}: net[{index}].{}", key.replace('-', "_"));
        network.check(option).map_err(SettingsError::Network)?;
        network.guests.iter().try_for_each(|guest| {
            let option = option("guests.socket");
            self.take_path(option.clone(), &guest.socket, option)
        })
    }

    /// Takes a path. Compares names only: two spellings of one path are found when the second
    /// socket cannot be made.
    fn take_path(&mut self, option: String, path: &Path, by: String) -> Result<(), SettingsError> {
        match self.paths.insert(absolute(path), by) {
            None => Ok(()),
            Some(other) => Err(SettingsError::Duplicate {
                option,
                value: path.display().to_string(),
                other,
            }),
        }
    }
}

pub(super) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}
