//! `--user USER`: a name, or a number, of /etc/passwd, and its groups of /etc/group.
//!
//! The files are read here rather than through the C library's name service, which a static binary cannot load.

use std::fs;
use std::path::Path;

use zerosock_sys::sandbox::User;

/// The user, for clap.
pub(crate) fn lookup(user: &str) -> Result<User, String> {
    lookup_in(user, Path::new("/etc/passwd"), Path::new("/etc/group"))
}

fn lookup_in(user: &str, passwd: &Path, group: &Path) -> Result<User, String> {
    let read = |path: &Path| {
        fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
    };
    // name:password:uid:gid:...
    let found = read(passwd)?.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, uid, gid) = (fields.next()?, fields.nth(1)?, fields.next()?);
        let (uid_number, gid) = (uid.parse().ok()?, gid.parse().ok()?);
        (name == user || uid == user).then(|| (name.to_owned(), uid_number, gid))
    });
    let (name, uid, gid) = found.ok_or("no such user in /etc/passwd")?;
    // name:password:gid:members
    let groups = read(group)?;
    let groups = groups.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let gid = fields.nth(2)?.parse().ok()?;
        let is_member = fields.next()?.split(',').any(|member| member == name);
        is_member.then_some(gid)
    });
    Ok(User {
        uid,
        gid,
        groups: groups.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_the_groups_that_name_it() {
        let dir = tempfile::tempdir().unwrap();
        let (passwd, group) = (dir.path().join("passwd"), dir.path().join("group"));
        fs::write(
            &passwd,
            "root:x:0:0::/:/bin/sh\nbroken\nzs:x:997:996::/:/bin/false\n",
        )
        .unwrap();
        fs::write(
            &group,
            "root:x:0:\nbroken\nkvm:x:104:alice,zs\nzsx:x:7:zsx\n",
        )
        .unwrap();
        let user = User {
            uid: 997,
            gid: 996,
            groups: vec![104],
        };
        assert_eq!(lookup_in("zs", &passwd, &group), Ok(user.clone()));
        assert_eq!(lookup_in("997", &passwd, &group), Ok(user));
        assert!(lookup_in("alice", &passwd, &group).is_err());
    }
}
