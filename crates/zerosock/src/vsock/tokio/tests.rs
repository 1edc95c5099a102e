//! Cancelled calls of an endpoint with a scripted backend.
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use ::tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use zerosock_proto::{Address, Port};

use super::connector::sealed;
use super::*;
use crate::table::sockets::{StreamId, StreamState};
use crate::vsock::fake::{core, info};
use crate::vsock::hub::Core;
use crate::vsock::seqpacket::SeqPacket;
use crate::vsock::stream::Stream;
use crate::vsock::waiting::Wait;

const THERE: Address = Address::new(zerosock_proto::Cid::new(4), Port::new(1));

/// What the endpoint of a fake backend is to [`AsyncStream::connect`].
struct From(Arc<Core>);

impl Connector for From {}

impl sealed::Connect for From {
    fn begin(&self, peer: Address) -> io::Result<Stream> {
        crate::vsock::connecting::begin_connect(&self.0, peer, Wait::Sleep)
    }

    fn begin_messages(&self, peer: Address) -> io::Result<SeqPacket> {
        crate::vsock::connecting::begin_connect(&self.0, peer, Wait::Sleep)
    }

    fn resolver(&self, _: &str) -> sealed::Resolver {
        unreachable!()
    }
}

async fn some_turns() {
    for _ in 0..10 {
        ::tokio::task::yield_now().await;
    }
}

#[::tokio::test]
async fn cancelled_calls_leave_no_registered_tasks() {
    let (core, _) = core();
    let state = info(StreamState::Connected);
    let stream = Stream::new(core.clone(), StreamId::FIRST, &state, Wait::Sleep);
    let stream = Arc::new(AsyncStream::new(stream).unwrap());
    some_turns().await;
    let before = core.waiters();
    for _ in 0..100 {
        let task = {
            let stream = stream.clone();
            ::tokio::spawn(async move { stream.recv().await.map(|_| ()) })
        };
        some_turns().await;
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }
    assert_eq!(core.waiters(), before, "recv");
    let mut stream = Some(Arc::into_inner(stream).unwrap());
    for _ in 0..100 {
        let mut mine = stream.take().unwrap();
        let task = ::tokio::spawn(async move {
            std::future::poll_fn(|cx| {
                let mut byte = [0];
                assert!(
                    Pin::new(&mut mine)
                        .poll_read(cx, &mut ReadBuf::new(&mut byte))
                        .is_pending()
                );
                assert!(Pin::new(&mut mine).poll_write(cx, b"x").is_pending());
                Poll::Ready(())
            })
            .await;
            mine
        });
        stream = Some(task.await.unwrap());
    }
    assert_eq!(core.waiters(), before + 2, "a reader and a writer");
    drop(stream);
    some_turns().await;
    assert_eq!(core.waiters(), 0, "the reactor has deregistered, too");
}

#[::tokio::test]
async fn cancelled_connect_closes_its_stream() {
    let (core, script) = core();
    let from = From(core.clone());
    let task = ::tokio::spawn(async move {
        let connected = AsyncStream::connect(&from, THERE).await;
        connected.map(|_| ())
    });
    some_turns().await;
    assert_eq!(core.waiters(), 2, "the reactor and this task");
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    some_turns().await;
    let script = script.lock().unwrap();
    assert_eq!((script.connected, script.closed), (1, 1));
    drop(script);
    assert_eq!(core.waiters(), 0);
}
