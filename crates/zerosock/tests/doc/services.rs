{
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("attach.sock");
    let mut config = zerosock::attach::AttachConfig::new(zerosock::attach::listen(&path)?);
    // Our own user only.
    config.service_uids = config.allowed_uids.clone();
    // Never shut down: it lasts as long as the example.
    std::mem::forget(zerosock::daemon::Daemon::start(zerosock::daemon::DaemonConfig {
        attach: Some(config),
        ..Default::default()
    })?);
    dir
}
