//! Addresses of names.
