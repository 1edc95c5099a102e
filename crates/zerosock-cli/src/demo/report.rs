//! The report that the demo prints, as text or JSON.

use std::fmt;

use serde::Serialize;

use super::environment::Environment;
use super::measure::{Figures, Measured};

/// The figures of one run.
pub(super) struct Report<'m> {
    measured: &'m Measured,
    release: String,
    accel: String,
    len: usize,
    /// Bytes passed in place, and bytes copied; `None` if the demo did not start the device.
    bytes: Option<(u64, u64)>,
}

/// The keys of `--json`: a stable interface.
#[derive(Serialize)]
struct Json<'r> {
    verified: bool,
    to_host_mb_s: f64,
    to_guest_mb_s: f64,
    rtt_us: f64,
    endpoint_to_host_mb_s: Option<f64>,
    endpoint_to_guest_mb_s: Option<f64>,
    endpoint_rtt_us: Option<f64>,
    accel: &'r str,
    in_place_bytes: Option<u64>,
    copied_bytes: Option<u64>,
}

impl<'m> Report<'m> {
    pub(super) fn new(
        measured: &'m Measured,
        environment: &mut Environment,
        len: usize,
    ) -> Report<'m> {
        Report {
            measured,
            release: environment.guest.release.clone(),
            accel: environment.guest.accel.to_string(),
            len,
            bytes: environment
                .stats()
                .map(|stats| (stats.in_place_bytes, stats.copied_bytes)),
        }
    }

    /// The report as one line of JSON.
    pub(super) fn json(&self) -> String {
        let round = |value: f64| (value * 10.0).round() / 10.0;
        let kernel = &self.measured.kernel;
        let endpoint = self.measured.endpoint.as_ref();
        let endpoint = endpoint.and_then(|figures| figures.as_ref().ok());
        serde_json::to_string(&Json {
            verified: self.measured.verified,
            to_host_mb_s: round(kernel.to_host_mb_s),
            to_guest_mb_s: round(kernel.to_guest_mb_s),
            rtt_us: round(kernel.rtt_us),
            endpoint_to_host_mb_s: endpoint.map(|it| round(it.to_host_mb_s)),
            endpoint_to_guest_mb_s: endpoint.map(|it| round(it.to_guest_mb_s)),
            endpoint_rtt_us: endpoint.map(|it| round(it.rtt_us)),
            accel: &self.accel,
            in_place_bytes: self.bytes.map(|(in_place, _)| in_place),
            copied_bytes: self.bytes.map(|(_, copied)| copied),
        })
        .unwrap_or_default()
    }
}

impl Report<'_> {
    fn write_figures(&self, f: &mut fmt::Formatter<'_>, by: &str, of: &Figures) -> fmt::Result {
        let len = self.len as f64 / 1e6;
        let Figures {
            to_host_mb_s,
            to_guest_mb_s,
            rtt_us,
            round_trips,
        } = of;
        writeln!(f, "  by {by}:")?;
        writeln!(
            f,
            "  guest to host    {to_host_mb_s:9.1} MB/s   {len:.1} MB"
        )?;
        writeln!(
            f,
            "  host to guest    {to_guest_mb_s:9.1} MB/s   {len:.1} MB"
        )?;
        writeln!(
            f,
            "  round trip       {rtt_us:9.1} us     median of {round_trips}, one byte"
        )
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Measured {
            verified,
            digest,
            kernel,
            endpoint,
        } = self.measured;
        writeln!(f, "\nLinux {} under QEMU ({})", self.release, self.accel)?;
        self.write_figures(f, "AF_VSOCK in the guest", kernel)?;
        match endpoint {
            Some(Ok(figures)) => self.write_figures(f, "an endpoint in the guest", figures)?,
            Some(Err(reason)) => writeln!(f, "  no endpoint in the guest: {reason}")?,
            None => {}
        }
        if let Some((in_place, copied)) = self.bytes {
            writeln!(f, "  moved in place   {:9.1} MB", in_place as f64 / 1e6)?;
            writeln!(f, "  copied by us     {:9.1} MB", copied as f64 / 1e6)?;
        }
        let verdict = if *verified {
            "the same at both ends"
        } else {
            "DIFFERENT"
        };
        write!(f, "  SHA-256          {verdict}: {digest}")
    }
}
