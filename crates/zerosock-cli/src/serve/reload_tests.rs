//! Unit tests of `reload`.

use super::*;
use crate::args::{Cli, Command};
use clap::Parser;

fn settings(yaml: &str) -> Settings {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vms.yaml");
    std::fs::write(&path, yaml).unwrap();
    let words = ["zerosock", "serve", "--config", path.to_str().unwrap()];
    match Cli::try_parse_from(words).unwrap().command {
        Command::Serve(args) => Settings::new(*args).unwrap(),
        other => panic!("{other:?}"),
    }
}

const NOW: &str = "
vms:
  - {guest_cid: 3, socket: /3, uds_path: /u3, groups: a}
  - {guest_cid: 4, socket: /4, uds_path: /u4}
attach: {socket: /a, uid: [7], max: 5}
";

#[test]
fn the_reload_separates_changes_that_apply_from_those_that_need_a_restart() {
    let mut now = settings(NOW);
    let same = Changes::between(&now, &settings(NOW));
    assert_eq!(same, Changes::default());
    let wanted = settings(
        "
vms:
  - {guest_cid: 5, socket: /5, uds_path: /u5}
  - {guest_cid: 3, socket: /x3, forward_cid: 1, forward_listen: 9, groups: b, queue_size: 64,
     tx_buffer_size: 4096}
attach: {socket: /b, mode: '0600', uid: [8], max: 6, groups: c, uds_path: '/p{cid}',
         service_uid: 9, service_max: 1}
spin_us: 70
max_memory: 2G
max_memory_total: 4G
"
        .replace("service_uid: 9", "service_uid: [9]")
        .as_str(),
    );
    let changes = Changes::between(&now, &wanted);
    assert_eq!(changes.add, [wanted.vms[0].clone()]);
    assert_eq!(changes.remove, [4]);
    assert_eq!(changes.groups, BTreeMap::from([(3, vec!["b".to_owned()])]));
    for (fixed, wanted) in changes.fixed.iter().zip([
        "VM 3: socket cannot change while it runs: it stays /3, not /x3;",
        "VM 3: its way to the host cannot change while it runs: it stays uds_path /u3, not \
             forward_cid 1 and port 9;",
        "VM 3: tx_buffer_size cannot change while it runs: it stays 262144, not 4096;",
        "VM 3: queue_size cannot change while it runs: it stays 1024, not 64;",
        "spin_us cannot change while it runs: it stays 0, not 70;",
        "max_memory cannot change while it runs: it stays 1099511627776, not 2147483648;",
        "max_memory_total cannot change while it runs: it stays 70368744177664, not 4294967296;",
        "attach: socket cannot change while it runs: it stays /a, not /b;",
        "attach: mode cannot change while it runs: it stays that of the other sockets, not 0600;",
        "attach: uds_path cannot change while it runs: it stays none, not /p{cid};",
    ]) {
        assert!(fixed.starts_with(wanted), "{fixed}");
    }
    assert_eq!(changes.fixed.len(), 10);
    let attach = changes.attach.clone().unwrap();
    assert_eq!((attach.socket, attach.mode), ("/a".into(), None));
    assert_eq!((attach.uids, attach.max), (vec![8], 6));
    assert_eq!((attach.service_uids, attach.service_max), (vec![9], 1));
    // Afterwards, only settings that need a restart differ.
    changes.note_in(&mut now);
    let again = Changes::between(&now, &wanted);
    assert_eq!(again.fixed.len(), 10);
    let fixed = again.fixed.clone();
    assert_eq!(
        again,
        Changes {
            fixed,
            ..Changes::default()
        }
    );
    let none = Changes::between(&now, &settings("vms: [{socket: /3, uds_path: /u3}]"));
    assert!(
        none.fixed[0].starts_with("attach cannot change"),
        "{none:?}"
    );
}

#[test]
fn guest_endpoints_are_added_changed_and_removed_by_a_reload() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    let write = |bytes: &[u8]| {
        std::fs::write(&key, bytes).unwrap();
        std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
    };
    write(b"a key of 24 random bytes");
    let without = "vms: [{guest_cid: 3, socket: /3, uds_path: /u3}]";
    let with = without.replace("}]", &format!(", guest_endpoints: {}}}]", key.display()));
    let (mut now, wanted) = (settings(without), settings(&with));
    let options = wanted.vms[0].guest_endpoints.clone();
    let changes = Changes::between(&now, &wanted);
    assert_eq!(
        changes.guest_endpoints,
        BTreeMap::from([(3, options.clone())])
    );
    assert_eq!(changes.fixed, [] as [String; 0]);
    changes.note_in(&mut now);
    assert_eq!(now.vms[0].guest_endpoints, options);
    assert_eq!(Changes::between(&now, &settings(&with)), Changes::default());
    // The same file with another key.
    write(b"another key of random bytes");
    let wanted = settings(&with);
    let changes = Changes::between(&now, &wanted);
    assert_eq!(changes.guest_endpoints.len(), 1);
    assert_ne!(changes.guest_endpoints[&3], options);
    let changes = Changes::between(&now, &settings(without));
    assert_eq!(changes.guest_endpoints, BTreeMap::from([(3, None)]));
    changes.note_in(&mut now);
    assert_eq!(now.vms[0].guest_endpoints, None);
}
