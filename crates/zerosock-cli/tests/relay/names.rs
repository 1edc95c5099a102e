//! Names of targets, resolved by the files of the system.
//!
//! A static program has no getaddrinfo: `scripts/test` runs this once more with the static release
//! (`ZEROSOCK_TEST_BINARY`). crates/zerosock-relay/tests/names.rs has the other cases.

#[path = "../../../zerosock-relay/tests/support/dns.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "the tests of zerosock-relay use the rest"
)]
mod dns;

use std::fs;
use std::io::Write;
use std::net::{Shutdown, TcpListener};
use std::process::Command;
use std::thread;

use zerosock_sys::network::isolate_thread;

use self::dns::{NameServer, Reply, addresses};
use crate::process::zerosock;
use crate::{connect, read_all, start_command, terminate};

/// A relay to `target`, which finds `resolv.conf` and `hosts` of the current directory in /etc.
const IN_ITS_OWN_FILES: &str = r#"mount --bind resolv.conf /etc/resolv.conf &&
    mount --bind hosts /etc/hosts && exec "$0" relay tcp-listen:127.0.0.1:0 "$1""#;

#[test]
fn names_of_a_name_server_a_search_domain_and_the_hosts_file_are_resolved() {
    let test = thread::spawn(|| {
        if let Err(error) = isolate_thread() {
            println!("SKIPPED network: no namespace can be made: {error}");
            return;
        }
        let up = Command::new("ip")
            .args(["link", "set", "lo", "up"])
            .status();
        assert!(up.expect("ip(8)").success());
        // Port 53 is free in this namespace.
        let _server =
            NameServer::start_at("127.0.0.53:53", |question| match question.name.as_str() {
                "full.example" => addresses(question, &["127.0.0.2"]),
                "short.search.example" => addresses(question, &["127.0.0.3"]),
                _ => Reply::NoSuchName,
            });
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write(
            "resolv.conf",
            "nameserver 127.0.0.53\nsearch search.example\n",
        );
        write("hosts", "127.0.0.4 box\n");
        for (name, address) in [
            ("full.example", "127.0.0.2"),
            ("short", "127.0.0.3"),
            ("box", "127.0.0.4"),
        ] {
            let target = TcpListener::bind((address, 0)).unwrap();
            let port = target.local_addr().unwrap().port();
            let mut command = Command::new("unshare");
            command.args(["--mount", "sh", "-c", IN_ITS_OWN_FILES]);
            command.arg(fs::canonicalize(zerosock().get_program()).unwrap());
            command.arg(format!("tcp:{name}:{port}"));
            let (running, relay) = start_command(command.current_dir(dir.path()));
            let mut client = connect(relay);
            client.write_all(name.as_bytes()).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            let (served, _) = target.accept().unwrap();
            assert_eq!(read_all(served), name.as_bytes());
            terminate(running);
        }
    });
    test.join().expect("the test has failed");
}
