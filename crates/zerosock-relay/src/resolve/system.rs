//! Queries by hickory-resolver, with the name servers and hosts of the system's files.
//!
//! # Invariants
//! - A name with an address in /etc/hosts is not asked of a name server, for either family.
//! - The files are read again within [`RECHECK`] of a change, at the next query.

use std::fs::{self, File, Metadata};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hickory_resolver::config::{
    ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts,
};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::op::{Query, ResponseCode};
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::{Hosts, TokioResolver, system_conf};
use tracing::warn;

use super::answer::{Family, LookupError, LookupResult};
use crate::target::DomainName;

/// How often the files are checked for a change, at most.
const RECHECK: Duration = Duration::from_secs(1);
/// Time after which a query is sent again, at most.
const QUERY_TIMEOUT: Duration = Duration::from_secs(2);
/// Times that a query is sent, at least.
const ATTEMPTS: usize = 2;
/// How long it is remembered that a name has no address, at most.
const NEGATIVE_TTL: Duration = Duration::from_secs(10);
/// Answers that are remembered.
const CACHE_SIZE: u64 = 1024;
/// Queries at once over one TCP connection to a name server.
const MAX_QUERIES: usize = 1024;

/// The name servers and hosts that the system's files name.
pub(crate) struct System {
    /// Name servers to ask instead of those in `resolv_conf`, if any.
    name_servers: Vec<SocketAddr>,
    resolv_conf: PathBuf,
    hosts: PathBuf,
    loaded: Mutex<Option<Loaded>>,
}

/// What was read from the files, and from which versions of them.
struct Loaded {
    checked: Instant,
    versions: [Option<Version>; 2],
    files: Arc<Files>,
}

struct Files {
    hosts: Hosts,
    /// The text tells why there are no name servers.
    resolver: Result<TokioResolver, String>,
}

/// Tells whether a file was changed or replaced.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
struct Version {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl System {
    pub(crate) fn new(name_servers: Vec<SocketAddr>, resolv_conf: PathBuf, hosts: PathBuf) -> Self {
        System {
            name_servers,
            resolv_conf,
            hosts,
            loaded: Mutex::new(None),
        }
    }

    /// The addresses of one family.
    pub(super) async fn query(&self, name: &DomainName, family: Family) -> LookupResult {
        let files = self.files();
        let name = Name::from_ascii(name.as_str())
            .map_err(|error| LookupError::Failed(error.to_string()))?;
        let in_hosts = |kind| {
            files
                .hosts
                .lookup_static_host(&Query::query(name.clone(), kind))
        };
        let kind = match family {
            Family::V4 => RecordType::A,
            Family::V6 => RecordType::AAAA,
        };
        let lookup = match (in_hosts(RecordType::A), in_hosts(RecordType::AAAA)) {
            (None, None) => {
                let resolver = files.resolver.as_ref();
                let resolver = resolver.map_err(|error| LookupError::Failed(error.clone()))?;
                resolver.lookup(name, kind).await.map_err(failure)?
            }
            (v4, v6) => match family {
                Family::V4 => v4.ok_or(LookupError::NoRecords)?,
                Family::V6 => v6.ok_or(LookupError::NoRecords)?,
            },
        };
        let of_kind = lookup
            .answers()
            .iter()
            .filter(|record| record.record_type() == kind);
        let addresses: Vec<IpAddr> = of_kind.filter_map(|record| record.data.ip_addr()).collect();
        match addresses.is_empty() {
            true => Err(LookupError::NoRecords),
            false => Ok(addresses),
        }
    }

    fn files(&self) -> Arc<Files> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(loaded) = &mut *loaded {
            if now.saturating_duration_since(loaded.checked) < RECHECK {
                return loaded.files.clone();
            }
            loaded.checked = now;
            if loaded.versions == self.versions() {
                return loaded.files.clone();
            }
        }
        // The versions before the contents: a change in between is seen at the next check.
        let versions = self.versions();
        let files = Arc::new(Files {
            hosts: read_hosts(&self.hosts),
            resolver: self.resolver(),
        });
        *loaded = Some(Loaded {
            checked: now,
            versions,
            files: files.clone(),
        });
        files
    }

    fn versions(&self) -> [Option<Version>; 2] {
        let version = |path: &Path| fs::metadata(path).ok().map(|file| Version::of(&file));
        [version(&self.resolv_conf), version(&self.hosts)]
    }

    fn resolver(&self) -> Result<TokioResolver, String> {
        let (config, mut options) = match self.name_servers.is_empty() {
            true => read_resolv_conf(&self.resolv_conf)?,
            false => {
                let servers = self.name_servers.iter().copied().map(name_server).collect();
                let config = ResolverConfig::from_parts(None, Vec::new(), servers);
                (config, ResolverOpts::default())
            }
        };
        options.timeout = options.timeout.min(QUERY_TIMEOUT);
        options.attempts = options.attempts.max(ATTEMPTS);
        options.use_hosts_file = ResolveHosts::Never;
        options.negative_max_ttl = Some(NEGATIVE_TTL);
        options.cache_size = CACHE_SIZE;
        options.max_active_requests = MAX_QUERIES;
        TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
            .with_options(options)
            .build()
            .map_err(|error| error.to_string())
    }
}

impl Version {
    fn of(file: &Metadata) -> Self {
        Version {
            device: file.dev(),
            inode: file.ino(),
            size: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
        }
    }
}

fn name_server(address: SocketAddr) -> NameServerConfig {
    let mut connections = vec![ConnectionConfig::udp(), ConnectionConfig::tcp()];
    for connection in &mut connections {
        connection.port = address.port();
    }
    NameServerConfig::new(address.ip(), true, connections)
}

fn read_resolv_conf(path: &Path) -> Result<(ResolverConfig, ResolverOpts), String> {
    let text = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let parsed = system_conf::parse_resolv_conf(text);
    parsed.map_err(|error| format!("{}: {error}", path.display()))
}

/// The hosts of a file; none if it does not exist.
fn read_hosts(path: &Path) -> Hosts {
    let mut hosts = Hosts::default();
    let read = File::open(path).and_then(|file| hosts.read_hosts_conf(file));
    match read {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            warn!("{}: {error}: its names are not known", path.display());
        }
        _ => {}
    }
    hosts
}

fn failure(error: NetError) -> LookupError {
    match &error {
        NetError::Dns(DnsError::NoRecordsFound(none))
            if matches!(
                none.response_code,
                ResponseCode::NXDomain | ResponseCode::NoError
            ) =>
        {
            LookupError::NoRecords
        }
        _ => LookupError::Failed(error.to_string()),
    }
}
