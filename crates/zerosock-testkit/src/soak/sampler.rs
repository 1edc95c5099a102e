//! Samples once a second, with the latency of an idle connection.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::common::now;
use super::lab::{Lab, Ping, counts};
use super::samples::Counts;

/// A thread that samples.
pub(super) struct Sampler {
    stop: Arc<AtomicBool>,
    samples: Arc<Mutex<Vec<Counts>>>,
}

impl Sampler {
    pub(super) fn start(lab: &Lab) -> Sampler {
        let sampler = Sampler {
            stop: Arc::default(),
            samples: Arc::default(),
        };
        let (stop, samples) = (sampler.stop.clone(), sampler.samples.clone());
        let (supervisor, dir, shared) = lab.parts();
        thread::spawn(move || {
            let mut ping = None;
            while !stop.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_secs(1));
                // Its answer is in the next sample.
                let _ = Pid::from_raw(supervisor as i32).map(|pid| kill_process(pid, Signal::USR1));
                let began = now();
                let latency = ping
                    .take()
                    .map_or_else(|| Ping::connect(&dir), Ok)
                    .and_then(|mut it: Ping| {
                        let latency = it.ping()?;
                        ping = Some(it);
                        Ok(latency)
                    });
                if let Err(error) = &latency {
                    shared.lock().failures.push(Ping::failure(began, error));
                }
                let mut sample = counts(supervisor, &shared);
                sample.latency = latency.unwrap_or(0.0) * 1e3;
                // Between two processes there is none to count.
                if sample.worker.threads > 0.0 {
                    samples.lock().expect("no panic").push(sample);
                }
            }
        });
        sampler
    }

    /// Lets the thread end.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(super) fn take(&self) -> Vec<Counts> {
        std::mem::take(&mut *self.samples.lock().expect("no panic"))
    }
}
