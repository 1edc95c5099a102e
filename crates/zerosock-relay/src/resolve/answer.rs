//! What a query for the addresses of one family gives.

use std::net::IpAddr;

/// The family of an address or query.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) fn of(address: IpAddr) -> Family {
        match address {
            IpAddr::V4(_) => Family::V4,
            IpAddr::V6(_) => Family::V6,
        }
    }
}

/// The addresses of one family.
pub(crate) type LookupResult = Result<Vec<IpAddr>, LookupError>;

/// Why there are no addresses of a family.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum LookupError {
    #[cfg_attr(not(feature = "names"), expect(dead_code))]
    /// The name does not exist, or has no address of the family.
    NoRecords,
    /// The question has no answer.
    Failed(String),
    /// The crate was built without the resolver.
    #[cfg(not(feature = "names"))]
    NotSupported,
}
