// What examples with two processes begin with: as hub.rs, and two endpoints that have attached
// there, the first of them by the name "db".
{
    let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
    let path = dir.path().join("attach.sock");
    let db = zerosock::vsock::Endpoint::builder().name("db").attach(&path);
    (db.unwrap(), zerosock::vsock::Endpoint::attach(&path).unwrap())
}
