//! Owns the recording upstream: HTTP/1.1 and h2c on one port, every request recorded before it is answered.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::wait::poll_until;

/// Numbers the executions of all origins in this process, so that no two answers look alike.
static EXECUTION: AtomicU64 = AtomicU64::new(1);

/// One request as the upstream saw it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    /// With the query.
    pub path: String,
    pub authority: String,
    /// In order; the lines of one name stand together.
    pub headers: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, Vec<u8>)>,
    /// False if the request broke off; such a request isn't an execution.
    pub complete: bool,
    pub seq: u64,
}

impl Seen {
    /// The first line of that name, if it is UTF-8.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.header_lines(name).first().and_then(|value| std::str::from_utf8(value).ok())
    }

    pub fn header_lines(&self, name: &str) -> Vec<&[u8]> {
        let lines = self.headers.iter().filter(|(line, _)| line.eq_ignore_ascii_case(name));
        lines.map(|(_, value)| value.as_slice()).collect()
    }

    pub fn key(&self) -> Option<&[u8]> {
        self.header_lines("idempotency-key").first().copied()
    }
}

/// What was seen, shared by the servers that record it.
#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<Recorded>>);

#[derive(Default)]
struct Recorded {
    requests: Vec<Seen>,
    /// By key and path: long runs must not search all requests for each.
    executions: HashMap<(Option<Vec<u8>>, String), usize>,
}

impl Recorder {
    /// Adds a request; returns which execution of its key and path this is, from 1.
    pub fn record(&self, seen: &mut Seen) -> usize {
        let mut recorded = self.0.lock().unwrap();
        seen.seq = recorded.requests.len() as u64;
        recorded.requests.push(seen.clone());
        let count =
            recorded.executions.entry((seen.key().map(<[u8]>::to_vec), seen.path.clone())).or_default();
        *count += usize::from(seen.complete);
        *count
    }

    /// Every request, broken-off ones included.
    pub fn requests(&self) -> Vec<Seen> {
        self.0.lock().unwrap().requests.clone()
    }

    pub fn executions(&self, which: impl Fn(&Seen) -> bool) -> usize {
        self.0.lock().unwrap().requests.iter().filter(|seen| seen.complete && which(seen)).count()
    }

    /// Executions with this raw Idempotency-Key value.
    pub fn executions_of(&self, key: &str) -> usize {
        self.executions(|seen| seen.key() == Some(key.as_bytes()))
    }
}

/// Holds executions until the test opens it. Clones are the same barrier.
#[derive(Clone)]
pub struct Barrier(Arc<watch::Sender<(usize, bool)>>);

impl Barrier {
    pub fn new() -> Barrier {
        Barrier(Arc::new(watch::Sender::new((0, false))))
    }

    /// How many have come to it so far.
    pub fn arrived(&self) -> usize {
        self.0.borrow().0
    }

    pub async fn wait_arrived(&self, count: usize, deadline: Duration) {
        poll_until(deadline, &format!("{count} arrivals at the barrier"), async || {
            (self.arrived() >= count).then_some(())
        })
        .await;
    }

    /// Lets all pass, those yet to come too.
    pub fn open(&self) {
        self.0.send_modify(|state| state.1 = true);
    }

    pub async fn pass(&self) {
        let mut state = self.0.subscribe();
        self.0.send_modify(|state| state.0 += 1);
        state.wait_for(|(_, open)| *open).await.expect("the barrier is held here");
    }
}

#[derive(Clone)]
enum Piece {
    Data(Bytes),
    Wait(Barrier),
    Abort,
}

/// A response to give.
#[derive(Clone)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, Vec<u8>)>,
    pub with_content_length: bool,
    pub trailers: Option<Vec<(String, Vec<u8>)>>,
    pub delay: Duration,
    hangs_up: bool,
    pieces: VecDeque<Piece>,
}

impl Reply {
    /// An empty response with `content-length`.
    pub fn status(status: u16) -> Reply {
        Reply {
            status,
            headers: vec![],
            with_content_length: true,
            trailers: None,
            delay: Duration::ZERO,
            hangs_up: false,
            pieces: VecDeque::new(),
        }
    }

    pub fn ok(body: impl Into<Bytes>) -> Reply {
        Self::status(200).chunk(body)
    }

    /// No response at all: the connection closes (HTTP/1.1), or the stream is reset (HTTP/2).
    pub fn hang_up() -> Reply {
        Reply { hangs_up: true, ..Self::status(200) }
    }

    /// `{"execution":N}`, N unlike any other.
    pub fn echo(status: u16) -> Reply {
        let execution = EXECUTION.fetch_add(1, Ordering::Relaxed);
        Self::status(status)
            .header("content-type", "application/json")
            .chunk(format!("{{\"execution\":{execution}}}"))
    }

    /// Adds a header line; the same name again makes a second line.
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Reply {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// One more piece of the body, written on its own.
    pub fn chunk(mut self, data: impl Into<Bytes>) -> Reply {
        self.pieces.push_back(Piece::Data(data.into()));
        self
    }

    /// Holds what follows in the body until `barrier` is open.
    pub fn wait(mut self, barrier: &Barrier) -> Reply {
        self.pieces.push_back(Piece::Wait(barrier.clone()));
        self
    }

    /// Breaks off here: the connection closes (HTTP/1.1), or the stream is reset (HTTP/2).
    pub fn abort(mut self) -> Reply {
        self.pieces.push_back(Piece::Abort);
        self
    }

    /// Chunked on HTTP/1.1, no length on HTTP/2.
    pub fn no_content_length(mut self) -> Reply {
        self.with_content_length = false;
        self
    }

    /// A trailer line, without `content-length`. (On HTTP/1.1 only for a request with `te: trailers`: see `RawOrigin`.)
    pub fn trailer(mut self, name: &str, value: impl AsRef<[u8]>) -> Reply {
        self.with_content_length = false;
        self.trailers.get_or_insert_default().push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// An upstream that works for so long before it answers.
    pub fn after(mut self, delay: Duration) -> Reply {
        self.delay = delay;
        self
    }
}

pub type ReplyFuture = Pin<Box<dyn Future<Output = Reply> + Send>>;

/// What the origin does with a request, once it is recorded.
#[derive(Clone)]
pub enum Behaviour {
    /// `Reply::echo(200)`.
    Echo,
    Respond(Reply),
    /// The nth execution of a key and path gets the nth reply; the last repeats.
    Sequence(Vec<Reply>),
    /// Waits at the barrier, then replies.
    Barrier(Barrier, Reply),
    /// Waits at the barrier, then echoes.
    BarrierEcho(Barrier),
    Fn(Arc<dyn Fn(Seen, usize) -> ReplyFuture + Send + Sync>),
}

impl Behaviour {
    /// `answer` gets the request and which execution of its key and path it is, from 1.
    pub fn func<F, Fut>(answer: F) -> Behaviour
    where
        F: Fn(Seen, usize) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Reply> + Send + 'static,
    {
        Behaviour::Fn(Arc::new(move |seen, nth| Box::pin(answer(seen, nth))))
    }

    /// The first execution of a key and path waits at the barrier; later ones are answered at once.
    pub fn first_waits(barrier: &Barrier) -> Behaviour {
        let barrier = barrier.clone();
        Behaviour::func(move |_, nth| {
            let barrier = barrier.clone();
            async move {
                if nth == 1 {
                    barrier.pass().await;
                }
                Reply::echo(200)
            }
        })
    }

    async fn reply(self, seen: Seen, nth: usize) -> Reply {
        match self {
            Behaviour::Echo => Reply::echo(200),
            Behaviour::Respond(reply) => reply,
            Behaviour::Sequence(mut replies) => {
                let last = replies.len().checked_sub(1).expect("a sequence has at least one reply");
                replies.swap_remove((nth.max(1) - 1).min(last))
            }
            Behaviour::Barrier(barrier, reply) => {
                barrier.pass().await;
                reply
            }
            Behaviour::BarrierEcho(barrier) => {
                barrier.pass().await;
                Reply::echo(200)
            }
            Behaviour::Fn(answer) => answer(seen, nth).await,
        }
    }
}

/// The recording upstream. It stops with its last clone.
#[derive(Clone)]
pub struct Origin {
    addr: SocketAddr,
    recorder: Recorder,
    behaviours: Arc<Mutex<HashMap<String, Behaviour>>>,
    server: Arc<Server>,
}

struct Server {
    stop: watch::Sender<bool>,
    accept: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accept.abort();
        let _ = self.stop.send(true);
    }
}

impl Origin {
    pub async fn start() -> Origin {
        Self::serve(TcpListener::bind("127.0.0.1:0").await.expect("a free port"))
    }

    /// On a port that another origin had before.
    pub async fn start_at(addr: SocketAddr) -> Origin {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(addr).expect("the port of a stopped origin");
        Self::serve(socket.listen(1024).unwrap())
    }

    fn serve(listener: TcpListener) -> Origin {
        let addr = listener.local_addr().unwrap();
        let recorder = Recorder::default();
        let behaviours = Arc::<Mutex<HashMap<String, Behaviour>>>::default();
        let stop = watch::Sender::new(false);
        let handler = Handler { recorder: recorder.clone(), behaviours: behaviours.clone() };
        let stopped = stop.subscribe();
        let accept = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (handler, mut stopped) = (handler.clone(), stopped.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        () = serve_connection(stream, handler) => {}
                        _ = stopped.wait_for(|stopped| *stopped) => {}
                    }
                });
            }
        });
        Origin { addr, recorder, behaviours, server: Arc::new(Server { stop, accept }) }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sets what is done with paths of that prefix; the longest prefix wins. Without any, the origin echoes.
    pub fn on(&self, path_prefix: &str, behaviour: Behaviour) -> &Origin {
        self.behaviours.lock().unwrap().insert(path_prefix.to_owned(), behaviour);
        self
    }

    /// Closes the port and cuts every connection; what was recorded stays.
    pub async fn stop(&self) {
        self.server.accept.abort();
        let _ = self.server.stop.send(true);
        poll_until(Duration::from_secs(5), "the origin stopped", async || {
            self.server.accept.is_finished().then_some(())
        })
        .await;
    }

    pub fn requests(&self) -> Vec<Seen> {
        self.recorder.requests()
    }

    pub fn executions(&self, which: impl Fn(&Seen) -> bool) -> usize {
        self.recorder.executions(which)
    }

    pub fn executions_of(&self, key: &str) -> usize {
        self.recorder.executions_of(key)
    }

    pub async fn wait_executions_of(&self, key: &str, count: usize, deadline: Duration) {
        poll_until(deadline, &format!("{count} executions of {key}"), async || {
            (self.executions_of(key) >= count).then_some(())
        })
        .await;
    }
}

/// A port that stays reserved and refuses connections until it is opened.
pub struct RefusedPort {
    socket: TcpSocket,
}

impl RefusedPort {
    pub fn new() -> RefusedPort {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        RefusedPort { socket }
    }

    pub fn addr(&self) -> SocketAddr {
        self.socket.local_addr().unwrap()
    }

    /// The upstream comes up.
    pub fn open(self) -> Origin {
        Origin::serve(self.socket.listen(1024).unwrap())
    }
}

#[derive(Clone)]
struct Handler {
    recorder: Recorder,
    behaviours: Arc<Mutex<HashMap<String, Behaviour>>>,
}

async fn serve_connection(stream: TcpStream, handler: Handler) {
    let _ = stream.set_nodelay(true);
    let http2 = is_http2(&stream).await;
    let io = TokioIo::new(stream);
    let service = service_fn(move |request| {
        let handler = handler.clone();
        async move { handler.answer(request).await }
    });
    // A connection that ends in an error is what many tests are about.
    let _ = if http2 {
        hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .max_concurrent_streams(4096)
            .initial_stream_window_size(16 * 1024 * 1024)
            .initial_connection_window_size(16 * 1024 * 1024)
            .serve_connection(io, service)
            .await
    } else {
        hyper::server::conn::http1::Builder::new().serve_connection(io, service).await
    };
}

async fn is_http2(stream: &TcpStream) -> bool {
    let mut start = [0; 4];
    loop {
        match stream.peek(&mut start).await {
            Ok(n) if n > 0 && n < 4 && start[..n] == b"PRI "[..n] => tokio::task::yield_now().await,
            Ok(n) => return start[..n] == *b"PRI ",
            Err(_) => return false,
        }
    }
}

impl Handler {
    async fn answer(&self, request: http::Request<Incoming>) -> std::io::Result<http::Response<ReplyBody>> {
        let (parts, mut body) = request.into_parts();
        let authority = parts.uri.authority().map(|authority| authority.to_string()).unwrap_or_else(|| {
            let host = parts.headers.get("host").map(HeaderValue::as_bytes).unwrap_or_default();
            String::from_utf8_lossy(host).into_owned()
        });
        let mut seen = Seen {
            method: parts.method.to_string(),
            path: parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
            authority,
            headers: lines(&parts.headers),
            body: vec![],
            trailers: vec![],
            complete: true,
            seq: 0,
        };
        let mut bytes = BytesMut::new();
        while let Some(frame) = body.frame().await {
            match frame {
                Ok(frame) => match frame.into_data() {
                    Ok(data) => bytes.extend_from_slice(&data),
                    Err(frame) => seen.trailers = frame.trailers_ref().map(lines).unwrap_or_default(),
                },
                Err(_) => {
                    seen.complete = false;
                    break;
                }
            }
        }
        seen.body = bytes.to_vec();
        let nth = self.recorder.record(&mut seen);
        let behaviour = self.behaviour_of(&seen.path);
        let reply = behaviour.reply(seen, nth).await;
        if !reply.delay.is_zero() {
            tokio::time::sleep(reply.delay).await;
        }
        if reply.hangs_up {
            return Err(std::io::Error::other("the origin hangs up"));
        }
        Ok(response(reply))
    }

    fn behaviour_of(&self, path: &str) -> Behaviour {
        let behaviours = self.behaviours.lock().unwrap();
        let matching = behaviours.iter().filter(|(prefix, _)| path.starts_with(prefix.as_str()));
        let longest = matching.max_by_key(|(prefix, _)| prefix.len());
        longest.map_or(Behaviour::Echo, |(_, behaviour)| behaviour.clone())
    }
}

fn response(reply: Reply) -> http::Response<ReplyBody> {
    let mut response = http::Response::new(ReplyBody {
        length: reply.with_content_length.then(|| {
            let data = |piece: &Piece| if let Piece::Data(data) = piece { data.len() as u64 } else { 0 };
            reply.pieces.iter().map(data).sum()
        }),
        pieces: reply.pieces,
        trailers: reply.trailers.map(|trailers| header_map(&trailers)),
        waiting: None,
    });
    *response.status_mut() = http::StatusCode::from_u16(reply.status).expect("a status");
    *response.headers_mut() = header_map(&reply.headers);
    response
}

fn lines(map: &HeaderMap) -> Vec<(String, Vec<u8>)> {
    map.iter().map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec())).collect()
}

fn header_map(lines: &[(String, Vec<u8>)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a header name");
        map.append(name, HeaderValue::from_bytes(value).expect("a header value"));
    }
    map
}

struct ReplyBody {
    pieces: VecDeque<Piece>,
    length: Option<u64>,
    trailers: Option<HeaderMap>,
    waiting: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        loop {
            if let Some(waiting) = &mut this.waiting {
                std::task::ready!(waiting.as_mut().poll(cx));
                this.waiting = None;
            }
            match this.pieces.pop_front() {
                Some(Piece::Data(data)) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                // What came before must be on the wire when the next piece waits or breaks off, so the task yields.
                Some(Piece::Wait(barrier)) => {
                    this.waiting = Some(Box::pin(async move {
                        tokio::task::yield_now().await;
                        barrier.pass().await;
                    }));
                }
                Some(Piece::Abort) => {
                    return Poll::Ready(Some(Err(std::io::Error::other("the reply breaks off here"))));
                }
                None => return Poll::Ready(this.trailers.take().map(|map| Ok(Frame::trailers(map)))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty() && self.trailers.is_none() && self.waiting.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match self.length {
            Some(length) => SizeHint::with_exact(length),
            None => SizeHint::default(),
        }
    }
}
