//! What there is to tell of connections.

use super::{Sockets, StreamId};

/// Each kind is told once until it happens again, in this order.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum News {
    Connected = 0,
    Readable = 1,
    PeerShutdown = 2,
    Writable = 3,
    Refused = 4,
    Closed = 5,
}

const NEWS: [News; 6] = [
    News::Connected,
    News::Readable,
    News::PeerShutdown,
    News::Writable,
    News::Refused,
    News::Closed,
];

impl<T> Sockets<T> {
    /// Notes that there is something to tell about a connection.
    #[inline]
    pub(crate) fn announce(&mut self, id: StreamId, news: News) {
        let Some(conn) = self.get_mut(id) else {
            return;
        };
        conn.news |= 1 << news as u8;
        if !std::mem::replace(&mut conn.listed, true) {
            self.with_news.push_back(id.index);
        }
    }

    /// The next thing to tell. Connections take turns.
    pub(crate) fn next_news(&mut self) -> Option<(StreamId, News)> {
        loop {
            let index = self.with_news.pop_front()?;
            let conn = self.conns.get_mut(index as usize)?;
            conn.listed = false;
            if conn.unread == 0 && conn.messages().unwrap_or(0) == 0 {
                conn.news &= !(1 << News::Readable as u8);
            }
            let Some(news) = NEWS
                .into_iter()
                .find(|news| conn.news & (1 << *news as u8) != 0)
            else {
                continue;
            };
            conn.news &= !(1 << news as u8);
            if conn.news != 0 {
                conn.listed = true;
                self.with_news.push_back(index);
            }
            let generation = conn.generation;
            return Some((StreamId { index, generation }, news));
        }
    }

    /// The next connection with anything to tell, all of which is then told. Not to be mixed with
    /// [`next_news`](Self::next_news).
    pub(crate) fn next_stirred(&mut self) -> Option<StreamId> {
        loop {
            let index = self.with_news.pop_front()?;
            let conn = self.conns.get_mut(index as usize)?;
            conn.listed = false;
            if std::mem::take(&mut conn.news) != 0 && conn.used {
                let generation = conn.generation;
                return Some(StreamId { index, generation });
            }
        }
    }
}
