//! QEMU's monitor protocol.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use crate::lab::STEP;

/// A connection to the monitor of a guest's QEMU.
pub(crate) struct Monitor(BufReader<UnixStream>);

impl Monitor {
    pub(crate) fn new(stream: UnixStream) -> Monitor {
        stream.set_read_timeout(Some(STEP)).expect("a deadline");
        let mut monitor = Monitor(BufReader::new(stream));
        monitor.ask("qmp_capabilities", json!({}));
        monitor
    }

    /// Runs a command, which must succeed.
    #[track_caller]
    pub(crate) fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let request = json!({"execute": command, "arguments": arguments});
        let stream = self.0.get_mut();
        stream
            .write_all(request.to_string().as_bytes())
            .expect("written");
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).expect("an answer of QEMU");
            let mut answer: Value = serde_json::from_str(&line).expect("JSON");
            assert!(answer.get("error").is_none(), "{command}: {line}");
            // Others are the greeting and events.
            if let Some(result) = answer.get_mut("return") {
                return result.take();
            }
        }
    }
}
