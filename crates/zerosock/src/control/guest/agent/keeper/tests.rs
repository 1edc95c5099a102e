//! A keeper on a thread: one agent at a time, refusals, and its end. What it does with huge pages is tested in guests.

use std::path::PathBuf;
use std::thread::JoinHandle;

use tempfile::TempDir;
use zerosock_sys::memfd;

use super::process::serve;
use super::*;

const ID: AttachmentId = AttachmentId([1; 16]);

/// A keeper that listens, and its socket.
fn keeper() -> (TempDir, PathBuf, JoinHandle<io::Result<()>>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keeper");
    let listener = listen(&path).unwrap();
    (dir, path, thread::spawn(move || serve(&listener)))
}

#[test]
fn a_keeper_has_one_agent_and_ends_with_it_when_it_has_no_pins() {
    let (_dir, path, thread) = keeper();
    let first = Keeper::find_or_start(&path, KeeperEntry(())).unwrap();
    first.unpin(ID).unwrap();
    let second = Keeper::find_or_start(&path, KeeperEntry(()));
    assert!(matches!(second, Err(KeeperError::Busy)), "{second:?}");
    first.unpin(ID).unwrap();
    drop(first);
    thread.join().unwrap().unwrap();
}

#[test]
fn files_of_other_pages_are_refused_by_name() {
    let (_dir, path, thread) = keeper();
    let agent = Keeper::find_or_start(&path, KeeperEntry(())).unwrap();
    for (len, error) in [
        (4096, "4096 bytes are not a number of huge pages"),
        (0, "0 bytes are not a number of huge pages"),
        // Small pages: where io_uring is forbidden here, they are not even pinned.
        (2 << 20, ""),
    ] {
        let file = memfd::create("small", len, false).unwrap();
        let refused = agent.pin(ID, &file);
        let Err(KeeperError::Refused(text)) = refused else {
            panic!("{len}: {refused:?}");
        };
        assert!(text.contains(error), "{text}");
    }
    agent.unpin(ID).unwrap();
    drop(agent);
    thread.join().unwrap().unwrap();
}

#[test]
fn a_request_of_another_form_ends_the_connection() {
    let (_dir, path, thread) = keeper();
    let agent = Keeper::find_or_start(&path, KeeperEntry(())).unwrap();
    fd_passing::send(&agent, &[IoSlice::new(b"short")], &[]).unwrap();
    let error = agent.unpin(ID).unwrap_err();
    assert!(matches!(error, KeeperError::Gone(_)), "{error}");
    thread.join().unwrap().unwrap();
}
