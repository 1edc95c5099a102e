//! A hook point for tests: a function that the code under test calls once, at one place.
//!
//! A test of a race puts the second thread's steps here. They happen exactly there, so that the
//! test needs no timing.

use std::sync::Mutex;

type Call = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(super) struct Hook(Mutex<Option<Call>>);

impl Hook {
    /// Makes the code under test call `call` when it next reaches this point.
    pub(super) fn set(&self, call: impl FnOnce() + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(call));
    }

    pub(super) fn call(&self) {
        // Taken out first: the call may reach this point, too.
        let call = self.0.lock().unwrap().take();
        if let Some(call) = call {
            call();
        }
    }
}
