//! What the log says about the driver.

use std::time::{Duration, Instant};

use super::connection::Driver;
use super::{Front, Vm};

/// How long a driver has to put the first buffer into a queue, before the log says that its memory is
/// probably not shared.
pub(super) const FIRST_BUFFER: Duration = Duration::from_secs(2);

impl Vm {
    /// When the log is to say that the driver has put nothing into its queues.
    pub(super) fn driver_deadline(&self) -> Option<Instant> {
        match &self.front {
            Front::Live(connection) => match connection.driver {
                Driver::Began(since) => Some(since + FIRST_BUFFER),
                Driver::Away | Driver::Ready => None,
            },
            Front::Idle | Front::Draining(_) => None,
        }
    }

    /// Logs that the driver has become ready, or has gone.
    pub(super) fn note_driver(&mut self) {
        let Front::Live(connection) = &mut self.front else {
            return;
        };
        let session = &connection.session;
        match (&connection.driver, session.is_driver_ready()) {
            (Driver::Away, true) => {
                connection.driver = Driver::Began(Instant::now());
                if let Some(suppressed) = self.drivers.admit(Instant::now()) {
                    let features = session.accepted_features();
                    let queues = session.running_queues();
                    tracing::info!(
                        vm = %self.name, features, queues, suppressed, "driver ready"
                    );
                }
            }
            (Driver::Began(_) | Driver::Ready, false) => {
                connection.driver = Driver::Away;
                self.log_driver_gone("a queue was stopped, or the device was reset");
            }
            _ => {}
        }
    }

    pub(super) fn log_driver_gone(&self, reason: &str) {
        if let Some(suppressed) = self.drivers.admit(Instant::now()) {
            tracing::info!(vm = %self.name, reason, suppressed, "driver gone");
        }
    }

    /// Warns if the driver has put nothing into its queues.
    pub(super) fn check_first_buffer(&mut self) {
        let Front::Live(connection) = &mut self.front else {
            return;
        };
        connection.driver = Driver::Ready;
        if connection.session.is_driver_silent() {
            self.warn(&format!(
                "the queues run, and there has been no buffer in them for {} s: the guest's memory is \
                 probably not shared; with QEMU add share=on to -object memory-backend-file, or use \
                 memory-backend-memfd",
                FIRST_BUFFER.as_secs()
            ));
        }
    }
}
