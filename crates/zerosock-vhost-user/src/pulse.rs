//! Whether a thread makes progress: it is asked through its own queue of messages, and answers
//! when it takes the question out.
//!
//! An idle thread is woken by the question; one that is stuck in a call or a loop does not answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A thread that can be asked.
#[derive(Debug, Default)]
pub struct Pulse(Arc<AtomicBool>);

/// A question that was not answered yet.
#[derive(Debug)]
pub struct Question(Arc<AtomicBool>);

impl Pulse {
    /// The next question, if the last one was answered.
    pub fn ask(&self) -> Option<Question> {
        let unanswered = self.0.swap(true, Ordering::Relaxed);
        (!unanswered).then(|| Question(self.0.clone()))
    }
}

impl Question {
    /// To be called by the thread that is asked. A question that is dropped stays unanswered.
    pub fn answer(self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_asked_again_when_it_has_answered() {
        let pulse = Pulse::default();
        let question = pulse.ask().unwrap();
        assert!(pulse.ask().is_none());
        question.answer();
        let question = pulse.ask().unwrap();
        drop(question);
        assert!(pulse.ask().is_none(), "a thread that has ended");
    }
}
