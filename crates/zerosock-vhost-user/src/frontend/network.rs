//! The requests of network devices, and the device status.

use std::os::fd::BorrowedFd;

use vhost::vhost_user::message::FrontendReq;

use super::{Frontend, FrontendError};

impl Frontend {
    /// SEND_RARP (needs RARP): the device broadcasts that `mac` is behind it now.
    pub fn send_rarp(&mut self, mac: [u8; 6]) -> Result<(), FrontendError> {
        let mut payload = [0; 8];
        payload[..6].copy_from_slice(&mac);
        self.send_request(FrontendReq::SEND_RARP, &payload, &[])
    }

    /// NET_SET_MTU (needs MTU): the MTU of the driver, in bytes.
    pub fn set_mtu(&mut self, mtu: u64) -> Result<(), FrontendError> {
        self.send_request(FrontendReq::NET_SET_MTU, &mtu.to_ne_bytes(), &[])
    }

    /// SET_STATUS (needs STATUS): the device status of the driver. 0 is kept like any other: it stops no queue.
    pub fn set_status(&mut self, status: u64) -> Result<(), FrontendError> {
        self.send_request(FrontendReq::SET_STATUS, &status.to_ne_bytes(), &[])
    }

    /// GET_STATUS (needs STATUS).
    pub fn get_status(&mut self) -> Result<u64, FrontendError> {
        self.request_u64(FrontendReq::GET_STATUS)
    }

    /// SET_BACKEND_REQ_FD (needs BACKEND_REQ): a socket on which the device sends requests of its own.
    pub fn set_backend_channel(&mut self, socket: BorrowedFd<'_>) -> Result<(), FrontendError> {
        self.send_request(FrontendReq::SET_BACKEND_REQ_FD, &[], &[socket])
    }
}
