//! TCP sockets with a BPF program that sees every send (sockmap, sk_msg). The kernel copies for it,
//! so a send takes no notification id, or several.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use zerosock_zc::{Copying, Outgoing, SendBackend, Sender, Sent};

use crate::alone::skip;
use crate::network::{BACKENDS, CABLE, accept, fill, slow_down, with_cable};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);
const LEN: usize = 200_000;

/// `union bpf_attr` as far as it is used here: words of 4 bytes, in the order of bpf.h.
type Attributes = [u32; 32];

fn bpf(command: libc::c_long, words: &[u32]) -> io::Result<i32> {
    let mut attributes: Attributes = [0; 32];
    attributes[..words.len()].copy_from_slice(words);
    // SAFETY: the attributes have the given length, and what they point to outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            attributes.as_mut_ptr(),
            size_of::<Attributes>(),
        )
    };
    match result {
        0.. => Ok(result as i32),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A pointer as two words.
fn at<T: ?Sized>(value: &T) -> [u32; 2] {
    let address = std::ptr::from_ref(value).cast::<u8>() as u64;
    [address as u32, (address >> 32) as u32]
}

fn descriptor(result: io::Result<i32>) -> io::Result<OwnedFd> {
    // SAFETY: the call has just returned it, and nothing else owns it.
    result.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A sockmap, and the program that sees the bytes sent over each of its sockets.
struct Map {
    map: OwnedFd,
    _program: OwnedFd,
}

impl Map {
    /// Lets everything pass, or sends it over the socket at 1 instead.
    fn new(redirects: bool) -> io::Result<Self> {
        const SOCKMAP: u32 = 15;
        const SK_MSG: u32 = 16;
        const SK_MSG_VERDICT: u32 = 7;
        let map = descriptor(bpf(0, &[SOCKMAP, 4, 4, 2]))?;
        let number = map.as_raw_fd() as u64;
        let exit = 0x95;
        let code: &[u64] = match redirects {
            // r0 = SK_PASS.
            false => &[1 << 32 | 0xb7, exit],
            // r2 = the map, r3 = 1, r4 = 0, bpf_msg_redirect_map.
            true => &[
                number << 32 | 0x1218,
                0,
                1 << 32 | 0x3b7,
                0x4b7,
                60 << 32 | 0x85,
                exit,
            ],
        };
        let (license, mut load) = (c"GPL", [0; 18]);
        load[..2].copy_from_slice(&[SK_MSG, code.len() as u32]);
        load[2..4].copy_from_slice(&at(code));
        load[4..6].copy_from_slice(&at(license));
        load[17] = SK_MSG_VERDICT;
        let program = descriptor(bpf(5, &load))?;
        let (target, attached) = (map.as_raw_fd() as u32, program.as_raw_fd() as u32);
        bpf(8, &[target, attached, SK_MSG_VERDICT])?;
        let _program = program;
        Ok(Self { map, _program })
    }

    fn insert(&self, index: u32, socket: &impl AsRawFd) {
        let value = socket.as_raw_fd();
        let (key, value) = (at(&index), at(&value));
        let map = self.map.as_raw_fd() as u32;
        bpf(2, &[map, 0, key[0], key[1], value[0], value[1]]).expect("a place in the map");
    }

    fn remove(&self, index: u32) {
        let key = at(&index);
        let map = self.map.as_raw_fd() as u32;
        bpf(3, &[map, 0, key[0], key[1]]).expect("it is in the map");
    }
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let near = TcpStream::connect(listener.local_addr().expect("an address"));
    let near = near.expect("loopback");
    (near, listener.accept().expect("a stream").0)
}

fn open(backend: SendBackend, socket: TcpStream) -> Sender<Vec<u8>> {
    let sender = Sender::builder().backend(backend).open(socket);
    sender.expect("a sender")
}

fn send(sender: &mut Sender<Vec<u8>>, at: &mut u64) {
    let mut bytes = vec![0; LEN];
    fill(&mut bytes, *at);
    *at += LEN as u64;
    let sent = sender.send(Outgoing::new(bytes).copying(Copying::Never));
    sent.map_err(|refused| refused.why).expect("it is accepted");
}

/// Gives the socket room for all bytes of a test: a send that is redirected to a full socket returns 0, and
/// fails.
fn widen(socket: &TcpStream) {
    let len: libc::c_int = 16 << 20;
    // SAFETY: the value is an integer that outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUFFORCE,
            (&raw const len).cast(),
            size_of_val(&len) as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

/// No id of it is ever reported.
#[test]
fn buffers_redirected_to_another_socket_are_returned() {
    for backend in BACKENDS {
        let map = match Map::new(true) {
            Ok(map) => map,
            Err(why) => return skip("bpf", "what_goes_over_another_socket", &why),
        };
        let ((near, _far), (other, end)) = (pair(), pair());
        widen(&other);
        map.insert(0, &near);
        map.insert(1, &other);
        let reader = thread::spawn(move || check(end));
        let mut sender = open(backend, near);
        let mut at = 0;
        (0..20).for_each(|_| send(&mut sender, &mut at));
        assert!(
            sender.finish(Some(PATIENCE)).expect("the kernel answers"),
            "{backend:?}"
        );
        let back: Vec<_> = std::iter::from_fn(|| sender.returned()).collect();
        assert_eq!(back.len(), 20, "{backend:?}");
        for returned in back {
            let sent = returned.outcome.expect("it was sent");
            assert!(
                backend == SendBackend::Uring || sent == Sent::Copied,
                "{backend:?}"
            );
        }
        drop((sender, map, other));
        assert_eq!(reader.join().expect("the contents"), at, "{backend:?}");
    }
}

/// With a program the kernel assigns several ids to a send. A sender that counts one id for each
/// would free later buffers too early, once they are no longer copied.
#[test]
fn no_buffer_is_returned_early_after_the_program_is_removed() {
    for backend in BACKENDS {
        let (told, address) = mpsc::channel();
        with_cable(
            "nothing_comes_back_early",
            move || {
                let address: std::net::SocketAddr = address.recv().expect("the far end");
                let near = TcpStream::connect(address).expect("a route");
                let map = match Map::new(false) {
                    Ok(map) => map,
                    Err(why) => return skip("bpf", "nothing_comes_back_early", &why),
                };
                map.insert(0, &near);
                let mut sender = open(backend, near);
                let mut at = 0;
                // Until the sender notices it; the first reported ids may not show it.
                for _ in 0..8 {
                    send(&mut sender, &mut at);
                    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
                }
                slow_down();
                (0..4).for_each(|_| send(&mut sender, &mut at));
                map.remove(0);
                (0..4).for_each(|_| send(&mut sender, &mut at));
                while !sender.is_quiet() {
                    sender.wait(Some(PATIENCE)).expect("the kernel answers");
                    for mut returned in std::iter::from_fn(|| sender.returned()) {
                        returned.outcome.expect("it was sent");
                        // The kernel must no longer read it.
                        returned.buffer.fill(0xee);
                    }
                }
                assert_eq!(sender.stats().bytes, at, "{backend:?}");
            },
            move || {
                let listener = TcpListener::bind(CABLE[0][1]).expect("an address");
                let address = listener.local_addr().expect("an address");
                told.send(address).expect("the near end");
                check(accept(&listener));
            },
        );
    }
}
