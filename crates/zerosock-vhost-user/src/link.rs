//! The handle by which a device closes the connection of its front-end, or changes its configuration space.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::mailbox::{ConfigChange, Mail, MailSender};

/// A worker's handle on one connection of a front-end.
#[derive(Clone)]
pub struct FrontendLink {
    end: LinkEnd,
    /// Set when the device was lost during this connection and the loss reported. Shared by the
    /// queue pairs.
    lost: Arc<AtomicBool>,
}

/// The front-end of a link.
#[derive(Clone)]
enum LinkEnd {
    Control {
        sender: MailSender,
        vm: usize,
        connection: u64,
    },
    /// A front-end in this process.
    Callback(Arc<dyn Fn(&str) + Send + Sync>),
}

impl FrontendLink {
    pub(super) fn new(sender: MailSender, vm: usize, connection: u64) -> FrontendLink {
        FrontendLink {
            end: LinkEnd::Control {
                sender,
                vm,
                connection,
            },
            lost: Arc::default(),
        }
    }

    /// The link to a front-end in this process. `close` is called with the reason when the device closes the
    /// connection, which may be more than once; it must not block. Changes of the configuration space are dropped.
    pub fn to(close: impl Fn(&str) + Send + Sync + 'static) -> FrontendLink {
        FrontendLink {
            end: LinkEnd::Callback(Arc::new(close)),
            lost: Arc::default(),
        }
    }

    /// Records that the device is lost. Returns true to the first caller, which reports the loss.
    pub fn note_loss(&self) -> bool {
        !self.lost.swap(true, Ordering::Relaxed)
    }

    /// Closes the connection; `reason` goes to the log. The worker then gets `Disconnected`. Has no
    /// effect if this connection has ended. Never blocks.
    pub fn close(&self, reason: impl fmt::Display) {
        let reason = reason.to_string();
        match &self.end {
            LinkEnd::Control {
                sender,
                vm,
                connection,
            } => sender.send(Mail::Close {
                vm: *vm,
                connection: *connection,
                reason,
            }),
            LinkEnd::Callback(close) => close(&reason),
        }
    }

    /// Changes the configuration space from `offset` on, until the driver changes its features or
    /// resets the device. `notify`: the driver is notified, if the front-end has a back-end request
    /// channel. Has no effect if this connection has ended. Never blocks.
    pub fn change_config(&self, offset: usize, bytes: &[u8], notify: bool) {
        if let LinkEnd::Control {
            sender,
            vm,
            connection,
        } = &self.end
        {
            sender.send(Mail::ConfigChange {
                vm: *vm,
                connection: *connection,
                change: ConfigChange {
                    offset,
                    bytes: bytes.to_vec(),
                    notify,
                },
            });
        }
    }
}

impl fmt::Debug for FrontendLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.end {
            LinkEnd::Control { vm, connection, .. } => f
                .debug_struct("FrontendLink")
                .field("vm", vm)
                .field("connection", connection)
                .finish(),
            LinkEnd::Callback(_) => f.write_str("FrontendLink(callback)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_callback_gets_the_reason_from_each_clone_and_a_loss_is_reported_once() {
        let (sender, reasons) = mpsc::channel();
        let link = FrontendLink::to(move |reason| sender.send(reason.to_owned()).unwrap());
        let other = link.clone();
        assert!(link.note_loss());
        assert!(!other.note_loss());
        other.change_config(0, &[1], true);
        other.close("memory vanished");
        assert_eq!(reasons.try_recv().unwrap(), "memory vanished");
        assert!(reasons.try_recv().is_err());
    }
}
