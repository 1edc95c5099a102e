//! The handle by which a device closes the connection of its front-end, or changes its configuration space.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::mailbox::{ConfigChange, Mail, MailSender};

/// A worker's handle on one connection of a front-end.
#[derive(Clone)]
pub struct FrontendLink {
    sender: MailSender,
    vm: usize,
    connection: u64,
    /// Set when the device was lost during this connection and the loss reported. Shared by the
    /// queue pairs.
    lost: Arc<AtomicBool>,
}

impl FrontendLink {
    pub(super) fn new(sender: MailSender, vm: usize, connection: u64) -> FrontendLink {
        FrontendLink {
            sender,
            vm,
            connection,
            lost: Arc::default(),
        }
    }

    /// A link that discards its requests, for tests of devices.
    ///
    /// # Errors
    /// eventfd(2) fails.
    pub fn discarded() -> std::io::Result<FrontendLink> {
        Ok(FrontendLink::new(MailSender::new()?.0, 0, 0))
    }

    /// Records that the device is lost. Returns true to the first caller, which reports the loss.
    pub fn note_loss(&self) -> bool {
        !self.lost.swap(true, Ordering::Relaxed)
    }

    /// Closes the connection; `reason` goes to the log. The worker then gets `Disconnected`. Has no
    /// effect if this connection has ended. Never blocks.
    pub fn close(&self, reason: impl fmt::Display) {
        self.sender.send(Mail::Close {
            vm: self.vm,
            connection: self.connection,
            reason: reason.to_string(),
        });
    }

    /// Changes the configuration space from `offset` on, until the driver changes its features or
    /// resets the device. `notify`: the driver is notified, if the front-end has a back-end request
    /// channel. Has no effect if this connection has ended. Never blocks.
    pub fn change_config(&self, offset: usize, bytes: &[u8], notify: bool) {
        self.sender.send(Mail::ConfigChange {
            vm: self.vm,
            connection: self.connection,
            change: ConfigChange {
                offset,
                bytes: bytes.to_vec(),
                notify,
            },
        });
    }
}

impl fmt::Debug for FrontendLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrontendLink")
            .field("vm", &self.vm)
            .field("connection", &self.connection)
            .finish()
    }
}
