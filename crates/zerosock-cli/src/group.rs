//! `--socket-group GROUP`: a number, or a name looked up in /etc/group.
//!
//! The file is read here rather than through the C library's name service, which a static binary
//! cannot load.

use std::fs;
use std::io;
use std::path::Path;

/// Why a group has no id.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GroupError {
    #[error("no such group in /etc/group; give a name from there, or a number")]
    Unknown,
    #[error("/etc/group cannot be read ({0}); give the group's number")]
    Unreadable(#[from] io::Error),
}

/// The group's id. 4294967295 is refused: chown(2) takes it as "unchanged".
pub(crate) fn lookup(group: &str) -> Result<u32, GroupError> {
    lookup_in(group, Path::new("/etc/group"))
}

fn lookup_in(group: &str, file: &Path) -> Result<u32, GroupError> {
    if let Ok(gid) = group.parse() {
        return if gid == u32::MAX {
            Err(GroupError::Unknown)
        } else {
            Ok(gid)
        };
    }
    // name:password:gid:members
    for line in fs::read_to_string(file)?.lines() {
        let mut fields = line.split(':');
        if fields.next() == Some(group)
            && let Some(gid) = fields.nth(1).and_then(|gid| gid.parse().ok())
        {
            return Ok(gid);
        }
    }
    Err(GroupError::Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("group");
        fs::write(&file, "root:x:0:\n# note\nbroken\nkvm:x:104:alice,bob\n").unwrap();
        assert_eq!(lookup_in("kvm", &file).unwrap(), 104);
        assert_eq!(lookup_in("root", &file).unwrap(), 0);
        assert_eq!(lookup_in("77", Path::new("/nonexistent")).unwrap(), 77);
        for name in ["alice", "broken", "", "kv", "4294967295"] {
            assert!(
                matches!(lookup_in(name, &file), Err(GroupError::Unknown)),
                "{name:?}"
            );
        }
        assert!(matches!(
            lookup_in("kvm", Path::new("/nonexistent")),
            Err(GroupError::Unreadable(_))
        ));
    }
}
