// What the examples of receive maps begin with: as pair.rs, without trust, and the process's end
// may have maps.
{
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let builder = zerosock::vsock::Host::builder().attach(&path);
    let host = builder.start().unwrap();
    let listener = host.listen(zerosock::Port::new(1), 1).unwrap();
    std::thread::spawn(move || {
        while host.drive().is_ok() {
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    });
    let process = zerosock::vsock::Endpoint::attach(&path).unwrap();
    process.set_rx_map(true);
    let to = zerosock::Address::new(zerosock::Cid::HOST, zerosock::Port::new(1));
    let theirs = process.connect(to).unwrap();
    (listener.accept().unwrap().0, theirs)
}
