// The start of examples in the documentation that attach: a host at `attach.sock` in a directory of
// its own, and a thread that calls its `drive`. The host has no listener. The including example
// keeps the directory.
{
    let dir = tempfile::tempdir().unwrap();
    let builder = zerosock::vsock::Host::builder().attach(dir.path().join("attach.sock"));
    let host = builder.start().unwrap();
    std::thread::spawn(move || {
        while host.drive().is_ok() {
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    });
    dir
}
