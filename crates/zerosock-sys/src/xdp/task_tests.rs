//! Unit tests of `task`.

use super::*;
use rustix::event::{PollFd, PollFlags, poll};
use std::sync::mpsc;

#[test]
fn result_is_announced_by_the_descriptor() {
    let mut task = Task::start("task", || 7).unwrap();
    poll(&mut [PollFd::new(&task, PollFlags::IN)], None).unwrap();
    assert_eq!(task.take(), Some(7));
    assert_eq!(task.take(), None);
}

/// A result that says where it was dropped.
#[derive(Debug)]
struct Dropped(mpsc::Sender<std::thread::ThreadId>);

impl Drop for Dropped {
    fn drop(&mut self) {
        let _ = self.0.send(std::thread::current().id());
    }
}

#[test]
fn abandoned_task_is_not_waited_for_and_its_result_is_dropped_elsewhere() {
    let (sender, dropped) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let result = Dropped(sender.clone());
    let task = Task::start("task", move || {
        wait.recv().unwrap();
        result
    });
    drop(task.unwrap());
    go.send(()).unwrap();
    assert_ne!(dropped.recv().unwrap(), std::thread::current().id());

    let finished = Task::start("task", move || Dropped(sender)).unwrap();
    poll(&mut [PollFd::new(&finished, PollFlags::IN)], None).unwrap();
    drop(finished);
    assert_ne!(dropped.recv().unwrap(), std::thread::current().id());
}
