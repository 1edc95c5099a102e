//! Unit tests of `mounts`.

use rustix::fs::{AtFlags, statx};

use super::*;

const LIST: &str = "\
21 1 0:19 / /proc rw,nosuid shared:2 - proc proc rw
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:30 / /home/m\\040m/x rw shared:3 - fuse.sshfs m@host:/ rw,user_id=7777,group_id=0
24 22 0:31 / /mnt rw - fuse fuse rw,user_id=0,group_id=0,allow_other
25 22 0:32 / /net rw - nfs4 server:/ rw
26 22 0:33 / /odd rw - fuseblk /dev/sdb rw
";

#[test]
fn fuse_of_another_user_is_not_usable_and_other_servers_are() {
    let classes: Vec<_> = parse(LIST).map(|mount| mount.class()).collect();
    let wanted = [
        MountClass::Proc,
        MountClass::Local,
        MountClass::ServedByOther(7777),
        MountClass::Served,
        MountClass::Served,
        MountClass::ServedByOther(u32::MAX),
    ];
    assert_eq!(classes, wanted);
    let ids: Vec<_> = parse(LIST).map(|mount| (mount.id, mount.device)).collect();
    assert_eq!(ids[2], ("23", "0:30"));
}

#[test]
fn a_mount_is_local_once_the_list_was_read() {
    let file = tempfile::tempfile().unwrap();
    let flags = AtFlags::EMPTY_PATH;
    let status = statx(&file, "", flags, StatxFlags::MNT_ID).unwrap();
    let id = mount_of(&file, &status).unwrap();
    assert_eq!(number(&file).unwrap(), Some(id.to_string()));
    if class(id).unwrap() != MountClass::Local {
        return println!("SKIPPED: the temporary directory is not on a local file system");
    }
    assert_eq!(class(u64::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
}
