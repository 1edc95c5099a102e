//! `--exec`: a command for each connection, which is its standard input and output.

use std::io::{self, Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;

use super::connection::Connection;

/// Why the command of a connection failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExecError {
    #[error("--exec: /bin/sh cannot be started: {0}")]
    Start(io::Error),
    #[error("--exec: {0}")]
    Wait(io::Error),
    #[error("--exec: `{command}`: {status}")]
    Failed {
        command: String,
        status: std::process::ExitStatus,
    },
}

/// Runs `command` by the shell, and waits for its end.
pub(super) fn run(command: &str, connection: Connection) -> Result<(), ExecError> {
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(command);
    let status = match connection {
        // The command has the socket itself.
        Connection::Socket(socket) | Connection::Packets(socket) => {
            let copy = socket.try_clone().map_err(ExecError::Start)?;
            shell.stdin(Stdio::from(socket)).stdout(Stdio::from(copy));
            let child = shell.spawn();
            // Else the peer would not see that the command has closed it.
            drop(shell);
            child.map_err(ExecError::Start)?.wait()
        }
        connection => {
            shell.stdin(Stdio::piped()).stdout(Stdio::piped());
            join(shell.spawn().map_err(ExecError::Start)?, &connection)
        }
    };
    match status.map_err(ExecError::Wait)? {
        status if status.success() => Ok(()),
        status => Err(ExecError::Failed {
            command: command.to_owned(),
            status,
        }),
    }
}

/// Copies between the command and the connection until the command has ended.
fn join(mut child: Child, connection: &Connection) -> io::Result<std::process::ExitStatus> {
    let (input, output) = (child.stdin.take(), child.stdout.take());
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut buffer = vec![0; connection.receives_at_once()];
            let Some(mut input) = input else { return };
            // Bytes that the command does not read are lost, as with any program.
            while let Ok(length @ 1..) = connection.receive(&mut buffer) {
                let received = buffer.get(..length).unwrap_or_default();
                if input.write_all(received).is_err() {
                    break;
                }
            }
        });
        let sent = output.map_or(Ok(()), |output| send_all(output, connection));
        let status = child.wait();
        // Ends the other thread, which may wait for bytes that nothing reads any more.
        connection.stop_receiving();
        sent.and(status)
    })
}

fn send_all(mut output: impl Read, connection: &Connection) -> io::Result<()> {
    let mut buffer = vec![0; connection.sends_at_once()];
    loop {
        let length = match output.read(&mut buffer) {
            Ok(0) => return connection.finish(),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let mut rest = buffer.get(..length).unwrap_or_default();
        while !rest.is_empty() {
            let sent = connection.send(rest)?;
            rest = rest.get(sent..).unwrap_or_default();
        }
    }
}
