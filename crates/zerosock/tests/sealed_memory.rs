//! VMs that must have sealed memory, beside one that need not.

use std::path::{Path, PathBuf};

use crate::common::driver::{Driver, DriverAttachError, DriverConfig, FrontendError};
use crate::common::{self, Vm, daemon_config, deadline, host, host_listener};
use zerosock::daemon::{Daemon, Reload, VmConfig};

fn attach(socket: &Path, seal: bool) -> Result<Driver, DriverAttachError> {
    Driver::attach(DriverConfig {
        seal,
        queue_pairs: common::pairs(),
        ..DriverConfig::new(socket)
    })
}

/// The front-end's request that was refused.
fn refused(attached: Result<Driver, DriverAttachError>) -> String {
    match attached {
        Err(DriverAttachError::Frontend(FrontendError::Refused { request, .. })) => request,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("taken"),
    }
}

#[test]
fn memory_that_can_shrink_is_refused_of_the_vms_that_require_a_seal() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: String| -> PathBuf { dir.path().join(name) };
    let vms = [3, 4, 5].map(|cid| Vm {
        cid,
        socket: at(format!("{cid}.vhost")),
        uds_path: at(format!("{cid}.vsock")),
    });
    let mut config = daemon_config(&vms);
    config.vms[1].require_sealed_memory = true;
    // The third comes at run time.
    let later = VmConfig {
        require_sealed_memory: true,
        stopped_timeout: None,
        ..config.vms.pop().unwrap()
    };
    let daemon = Daemon::start(config).unwrap();
    let add = vec![later];
    let reload = Reload {
        add,
        ..Reload::default()
    };
    daemon.reload(reload).unwrap();

    let _listener = host_listener(&vms[0].uds_path, 700);
    let mut guest = attach(&vms[0].socket, false).unwrap();
    guest.wait_connect(host(700), deadline()).unwrap();
    for (vm, faults) in vms[1..].iter().zip(1..) {
        assert_eq!(refused(attach(&vm.socket, false)), "SET_MEM_TABLE");
        assert_eq!(daemon.stats().control_faults, faults);
        let _listener = host_listener(&vm.uds_path, 700);
        let mut guest = sealed_guest(&vm.socket);
        guest.wait_connect(host(700), deadline()).unwrap();
    }
    daemon.shutdown();
}

/// A guest with sealed memory; the device may not yet have noticed that the last one has gone.
fn sealed_guest(socket: &Path) -> Driver {
    let give_up = deadline();
    loop {
        match attach(socket, true) {
            Ok(guest) => return guest,
            Err(error) => assert!(std::time::Instant::now() < give_up, "{error}"),
        }
    }
}
