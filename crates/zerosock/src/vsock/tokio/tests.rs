//! Cancels calls of async sockets, whose endpoint has a scripted backend.
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use ::tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use zerosock_proto::{Address, Port};

use super::*;
use crate::table::sockets::{StreamId, StreamState};
use crate::vsock::connection::Connected;
use crate::vsock::fake::{core, info};
use crate::vsock::stream::Stream;
use crate::vsock::waiting::Wait;

const PEER: Address = Address::new(zerosock_proto::Cid::new(4), Port::new(1));

/// Lets the other tasks run.
async fn yield_to_tasks() {
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
    yield_to_tasks().await;
    let before = core.waiters();
    for _ in 0..100 {
        let task = {
            let stream = stream.clone();
            ::tokio::spawn(async move { stream.recv().await.map(|_| ()) })
        };
        yield_to_tasks().await;
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
    yield_to_tasks().await;
    assert_eq!(core.waiters(), 0, "the reactor has deregistered as well");
}

#[::tokio::test]
async fn cancelled_connect_closes_its_stream() {
    let (core, script) = core();
    let endpoint = core.clone();
    let task = ::tokio::spawn(async move {
        let connected = AsyncStream::connect(&endpoint, PEER).await;
        connected.map(|_| ())
    });
    yield_to_tasks().await;
    assert_eq!(core.waiters(), 2, "the reactor and this task");
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    yield_to_tasks().await;
    let script = script.lock().unwrap();
    assert_eq!((script.connected, script.closed), (1, 1));
    drop(script);
    assert_eq!(core.waiters(), 0);
}
