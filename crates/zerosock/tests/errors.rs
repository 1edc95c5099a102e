//! Every public error can be returned with `?` from a function with `Box<dyn Error + Send + Sync>` or anyhow's
//! error: it is `Error + Send + Sync + 'static`. So are the buffers that errors contain.

use std::error::Error;

use zerosock::net::backend::FrameError;
use zerosock::zc::{Buf, Outgoing, PoolBuf, Refused, Sender};
use zerosock::{access, attach, daemon, driver, forward, net, vsock, zc};

fn portable<T: Send + Sync + 'static>() {}

fn error<E: Error + Send + Sync + 'static>() {}

/// Programs catch panics around calls of sockets.
#[test]
fn sockets_can_be_used_after_a_caught_panic() {
    fn usable<T: std::panic::UnwindSafe + std::panic::RefUnwindSafe>() {}
    usable::<vsock::Endpoint>();
    usable::<vsock::Host>();
    usable::<vsock::Stream>();
    usable::<vsock::SeqPacket>();
    usable::<vsock::Datagram>();
    usable::<vsock::Listener>();
}

#[test]
fn all_public_errors_can_cross_threads() {
    error::<zerosock::AddressError>();
    error::<access::RangeError>();
    error::<attach::AttachError>();
    error::<attach::NameError>();
    error::<attach::codec::AnswerError>();
    error::<daemon::ReloadError>();
    error::<daemon::StartError>();
    error::<driver::ArenaError>();
    error::<driver::DriverAttachError>();
    error::<driver::ConfigError>();
    error::<driver::DriverError>();
    error::<driver::FrontendError>();
    error::<driver::QueueSetupError>();
    error::<driver::SendFault>();
    error::<forward::ParseNetworkError>();
    error::<forward::ParseRuleError>();
    error::<forward::RuleError>();
    error::<vsock::BindError>();
    error::<vsock::ConnectError>();
    error::<vsock::DatagramError>();
    error::<vsock::DeviceError>();
    error::<vsock::EndpointEnded>();
    error::<vsock::OpenError>();
    error::<vsock::OptionError>();
    error::<vsock::RxMapError>();
    error::<vsock::StreamError>();
    #[cfg(feature = "tokio")]
    error::<vsock::tokio::ReuniteError>();
    error::<zc::Failed>();
    error::<zc::KeepReason>();
    error::<zc::NoSuchSlot>();
    error::<zc::Refusal>();
    error::<zc::Refused>();
    error::<zc::Refused<Vec<u8>>>();
    error::<zc::Refused<PoolBuf>>();
    error::<zc::SenderOpenError>();
    error::<net::interface::HeaderError>();
    error::<net::interface::InterfaceConfigError>();
    error::<net::interface::InterfaceConnectError>();
    error::<net::interface::InterfaceFailure>();
    error::<net::interface::LoanError>();
    portable::<FrameError>();
    portable::<Buf>();
}

#[test]
fn a_reserved_cid_is_reported_once() {
    let reserved = zerosock::Cid::HOST.for_guest().unwrap_err();
    let error = daemon::StartError::from(reserved);
    assert_eq!(error.to_string(), reserved.to_string());
    assert!(error.source().is_none(), "the same text again");
}

#[test]
fn a_refused_send_converts_to_the_error_of_a_thread() -> Result<(), Box<dyn Error + Send + Sync>> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let socket = std::net::TcpStream::connect(listener.local_addr()?)?;
    let mut sender: Sender = Sender::open(socket)?;
    sender.send(Outgoing::new(vec![1, 2, 3]))?;
    let refused = |sender: &mut Sender| -> Result<(), Box<dyn Error + Send + Sync>> {
        sender.send(Outgoing::new(vec![1]).slot(u32::MAX))?;
        Ok(())
    };
    let error = refused(&mut sender).unwrap_err();
    let refused = error
        .downcast_ref::<Refused>()
        .expect("the send, given back");
    assert_eq!(refused.outgoing.slot, Some(u32::MAX));
    Ok(())
}
