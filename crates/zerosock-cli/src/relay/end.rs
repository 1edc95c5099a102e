//! An end of a relay: a kernel socket, or one of an endpoint that attaches to `zerosock serve`.

use std::fmt;
use std::str::FromStr;

use zerosock_relay::relay::{Endpoint as KernelEnd, FORMS, ParseEndpointError};

use crate::nc::endpoint::{ATTACHED_FORMS, Endpoint as AttachedEnd};

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum End {
    Kernel(KernelEnd),
    /// `attach` or `attach-listen`, in either role.
    Attached(AttachedEnd),
}

impl FromStr for End {
    type Err = String;

    fn from_str(text: &str) -> Result<End, String> {
        match text.split_once(':').map_or(text, |(kind, _)| kind) {
            "attach" | "attach-listen" | "service" | "service-listen" => {
                let end = text.parse().map_err(|error| format!("{error}"))?;
                Ok(End::Attached(end))
            }
            _ => match text.parse() {
                Ok(end) => Ok(End::Kernel(end)),
                Err(ParseEndpointError::Kind(text)) => Err(format!(
                    "`{text}` is no endpoint: give one of {FORMS}, {ATTACHED_FORMS}"
                )),
                Err(error) => Err(error.to_string()),
            },
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Kernel(end) => end.fmt(f),
            End::Attached(end) => end.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_both_kinds_are_read() {
        for text in [
            "tcp-listen:127.0.0.1:80",
            "unix:/a",
            "hybrid:/a:7",
            "vsock:2:1",
        ] {
            let end: End = text.parse().unwrap();
            assert!(matches!(end, End::Kernel(_)), "{text}");
            assert_eq!(end.to_string(), text);
        }
        for text in ["attach:/a:3:7", "service-listen:/a:7"] {
            let end: End = text.parse().unwrap();
            assert!(matches!(end, End::Attached(_)), "{text}");
            assert_eq!(end.to_string(), text);
        }
        // Reserved CIDs have names; a process may be named "local".
        for (text, shown) in [
            ("vsock:host:0x16", "vsock:2:22"),
            ("service:/a:0x3:7", "service:/a:3:7"),
            ("attach:/a:host:7", "attach:/a:2:7"),
            ("attach:/a:local:7", "attach:/a:local:7"),
        ] {
            assert_eq!(text.parse::<End>().unwrap().to_string(), shown);
        }
        let said = |text: &str| text.parse::<End>().unwrap_err();
        let missing = said("attach:/a");
        assert!(missing.contains("attach:PATH:CID:PORT"), "{missing}");
        let forms = said("nonsense");
        for form in FORMS.split(", ").chain(ATTACHED_FORMS.split(", ")) {
            assert!(forms.contains(form), "{form}: {forms}");
            assert_eq!(forms.matches(form).count(), 1, "{form}: {forms}");
        }
    }
}
