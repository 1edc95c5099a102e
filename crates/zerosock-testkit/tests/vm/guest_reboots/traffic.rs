//! The host's programs, to which programs in the guest connect. Both check each byte.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use zerosock_testkit::guest::traffic::{BLOCK, Block, Checker};

/// A connection with a program in the guest, which checks bytes, too.
#[derive(Default)]
pub(super) struct Connection {
    /// Bytes of the guest.
    received: AtomicU64,
    /// Bytes that the guest has found right.
    confirmed: AtomicU64,
    ended: AtomicBool,
    wrong: Mutex<Option<String>>,
}

impl Connection {
    fn is_live(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }

    pub(super) fn progress(&self) -> u64 {
        let [received, confirmed] =
            [&self.received, &self.confirmed].map(|it| it.load(Ordering::Relaxed));
        received.min(confirmed)
    }

    fn receive(&self, mut socket: &UnixStream, seed: u64) {
        let (mut checker, mut bytes) = (Checker::new(seed, true), vec![0; BLOCK]);
        // An end, or a reset.
        while let Ok(len) = socket.read(&mut bytes)
            && len > 0
        {
            match checker.check(&bytes[..len]) {
                Ok(Some(confirmed)) => self.confirmed.store(confirmed, Ordering::Relaxed),
                Ok(None) => {}
                Err(text) => {
                    *self.wrong.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
                    break;
                }
            }
            self.received.store(checker.bytes, Ordering::Relaxed);
        }
    }

    fn run(self: &Arc<Connection>, mut socket: UnixStream) {
        let mut seed = [0; 8];
        if socket.read_exact(&mut seed).is_ok() {
            let seed = u64::from_le_bytes(seed);
            let mut out = socket.try_clone().expect("a descriptor");
            let sender = thread::spawn(move || {
                let mut block = Block::new(seed, false);
                let mut numbers = 0..;
                while let Some(number) = numbers.next()
                    && out.write_all(block.with(number)).is_ok()
                {}
            });
            self.receive(&socket, seed);
            let _ = socket.shutdown(std::net::Shutdown::Both);
            sender.join().expect("an end");
        }
        // The end is seen when no descriptor is left.
        drop(socket);
        self.ended.store(true, Ordering::Release);
    }
}

/// The connections of all programs so far.
#[derive(Clone, Default)]
pub(super) struct Traffic(Arc<Mutex<Vec<Arc<Connection>>>>);

impl Traffic {
    pub(super) fn serve(&self, listener: UnixListener) {
        let all = Arc::clone(&self.0);
        thread::spawn(move || {
            for socket in listener.incoming() {
                let connection = Arc::<Connection>::default();
                let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                all.push(Arc::clone(&connection));
                let socket = socket.expect("a connection");
                thread::spawn(move || connection.run(socket));
            }
        });
    }

    /// Those that have not ended. None has had a wrong byte.
    pub(super) fn live(&self) -> Vec<Arc<Connection>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for it in all.iter() {
            let wrong = it.wrong.lock().unwrap_or_else(PoisonError::into_inner);
            assert_eq!(*wrong, None);
        }
        all.iter().filter(|it| it.is_live()).cloned().collect()
    }
}
