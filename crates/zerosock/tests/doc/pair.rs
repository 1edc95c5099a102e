// What the examples in the documentation begin with: the two ends of a connection between a host
// and a process that has attached to it, both here, and a thread that keeps the host going. Trust
// is declared on both sides.
{
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    // SAFETY: both ends are in one example, which writes nothing that is on lease.
    let trust = unsafe { zerosock::vsock::Trust::declare() };
    let builder = zerosock::vsock::Host::builder().attach(&path);
    let host = builder.trust_processes(trust).start().unwrap();
    let listener = host.listen(zerosock::Port::new(1), 1).unwrap();
    std::thread::spawn(move || {
        while host.drive().is_ok() {
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    });
    let process = zerosock::vsock::Endpoint::builder().trust_host(trust);
    let process = process.attach(&path).unwrap();
    let to = zerosock::Address::new(zerosock::Cid::HOST, zerosock::Port::new(1));
    let theirs = process.connect(to).unwrap();
    (listener.accept().unwrap().0, theirs)
}
