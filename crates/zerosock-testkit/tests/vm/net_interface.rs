//! The example `http_to_guest` as the web server of stock guests, on a port of the switch. The host's
//! network stack has no part in it.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use zerosock_cli::vm::pattern::{Pattern, sha256};

use crate::Alone;
use crate::lab::Skipped;
use crate::net::guest::{Card, Image, Vm};
use crate::net::lab::Daemon;

#[path = "../../../zerosock/examples/http_to_guest.rs"]
#[expect(
    dead_code,
    reason = "the example has a main function and a demonstration"
)]
mod http_to_guest;

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("a_program_serves_http_to_user_mode_linux", user_mode),
    ("a_program_serves_http_to_a_guest_under_qemu", qemu),
];

const PROGRAM: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const MAC_A: &str = "52:54:00:00:00:0a";
const MAC_B: &str = "52:54:00:00:00:0b";

/// A line for the request so long that the guest sends it as a TSO frame.
const LONG_LINE: &str = "$(yes 0123456789abcde | head -n 800 | tr -d '\\n')";

/// Under user-mode Linux.
fn user_mode() -> Result<(), Skipped> {
    let image = Image::user_mode()?;
    serve(8 << 20, |daemon| {
        image.boot_user_mode(&daemon.path("guest"))
    });
    Ok(())
}

/// Under QEMU.
fn qemu() -> Result<(), Skipped> {
    let image = Image::debian("6.12")?;
    serve(2 << 20, |daemon| {
        image.boot_qemu(&Card::new(&daemon.path("guest"), MAC_A))
    });
    Ok(())
}

/// Serves a page of so many bytes.
fn serve(bytes: usize, boot: impl FnOnce(&Daemon) -> Vm) {
    let daemon = Daemon::start(&format!(
        "--socket @/guest,mac={MAC_A},mac-filter --socket @/program,mac={MAC_B},mac-filter"
    ));
    let page = Pattern::bytes(7, bytes);
    let expected = sha256(&page);
    let host = http_to_guest::Host::connect(&daemon.path("program"), PROGRAM).expect("a port");
    let over = Arc::new(AtomicBool::new(false));
    // Ends with the program if a check fails.
    let server = std::thread::spawn({
        let over = Arc::clone(&over);
        move || http_to_guest::serve(host, &page, &over)
    });
    let guest = boot(&daemon);
    guest.configure("10.77.0.2");
    let sum = |options: &str| {
        guest.sh(&format!(
            "wget -q -O /page {options} http://{PROGRAM}/ && sha256sum /page"
        ))
    };
    for options in ["", &format!("--header \"X-Long: {LONG_LINE}\"")] {
        let text = sum(options);
        assert!(text.contains(&expected), "{text}");
    }
    let (status, text) = guest.try_sh(&format!("wget -O - http://{PROGRAM}/nothing 2>&1"));
    assert!(status != 0 && text.contains("404 Not Found"), "{text}");

    over.store(true, Ordering::Relaxed);
    let stats = server.join().expect("the server").expect("no error");
    assert_eq!(stats.rx_dropped, 0, "{stats:?}");
    assert!(stats.rx_tso > 0, "no long frame: {stats:?}");
    println!("{stats:?}");
    drop(guest);
    daemon.stop();
}
