//! The endpoint argument of `zerosock nc`: those of `relay` without TCP, UDP and their kinds of messages.

use zerosock_relay::relay;

use crate::endpoint::{ATTACHED_FORMS, EndpointArg};

/// Why an argument is no endpoint of `nc`. clap prints the argument before the error.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum NcEndpointError {
    #[error("give one of {FORMS}, {ATTACHED_FORMS}")]
    Form,
    /// This end of a relay would connect.
    #[error(
        "nc has no TCP; use relay: `zerosock relay unix-listen:/tmp/s {0}`, and `zerosock nc unix:/tmp/s` \
         beside it. nc has {FORMS}, {ATTACHED_FORMS}"
    )]
    Tcp(String),
    /// This end of a relay would listen.
    #[error(
        "nc has no TCP; use relay: `zerosock relay {0} unix:/tmp/s`, and `zerosock nc unix-listen:/tmp/s` \
         beside it"
    )]
    TcpListen(String),
    #[error("nc has no UDP; use relay, which joins UDP to other sockets with messages")]
    Udp,
    /// The kind is known.
    #[error("{0}")]
    Fault(String),
}

/// The forms of a kernel socket, for the error text.
const FORMS: &str =
    "vsock:CID:PORT, vsock-listen:PORT, unix:PATH, unix-listen:PATH, hybrid:PATH:PORT";

/// Parses the argument.
pub(super) fn parse(text: &str) -> Result<EndpointArg, NcEndpointError> {
    let kind = text.split(':').next().unwrap_or_default();
    let kind = kind.to_ascii_lowercase();
    if kind.starts_with("udp") {
        return Err(NcEndpointError::Udp);
    }
    if kind.starts_with("tcp") {
        return Err(match text.parse::<relay::KernelEndpoint>() {
            Ok(end) => tcp(&end),
            Err(_) if kind.contains("listen") => {
                NcEndpointError::TcpListen("tcp-listen:ADDRESS:PORT".into())
            }
            Err(_) => NcEndpointError::Tcp("tcp:HOST:PORT".into()),
        });
    }
    let mut forms = FORMS.split(", ").chain(ATTACHED_FORMS.split(", "));
    let written = text.split(':').next();
    if forms.any(|form| form.split(':').next() == written) {
        return text.parse().map_err(NcEndpointError::Fault);
    }
    // Other netcats have TCP.
    Err(match format!("tcp:{text}").parse() {
        Ok(end) => tcp(&end),
        Err(_) => NcEndpointError::Form,
    })
}

/// The refusal of an end of a relay.
fn tcp(end: &relay::KernelEndpoint) -> NcEndpointError {
    match end.listens() {
        true => NcEndpointError::TcpListen(end.to_string()),
        false => NcEndpointError::Tcp(end.to_string()),
    }
}

#[cfg(test)]
#[path = "endpoint_tests.rs"]
mod tests;
