//! `/metrics`, `/livez`, `/readyz` and `/status`, read-only, on a thread and runtime of its own so that health answers while the
//! relay's runtime is stuck.
//!
//! Nothing here ever waits for a server, changes anything, or serves a key, payload or attribute of a row; and no client, slow
//! or many, can keep the others from being answered.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::{StatusCode, Uri};
use axum::middleware::map_response;
use axum::response::{Html, IntoResponse, Json, Response};
use axum::routing::get;
use axum::{Router, body::Body};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::relay::health::Board;
use crate::telemetry::{Metrics, REPEAT_EVERY, Repeats};

/// Bounds that keep a client from harming the others.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at once; one more ends the oldest, so that a probe gets through however many are held open.
    pub connections_max: usize,
    /// Time to send the head of a request.
    pub head_timeout: Duration,
    /// Time a connection may last from its first byte to its last.
    pub connection_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections_max: 64, head_timeout: Duration::from_secs(5), connection_timeout: Duration::from_secs(10) }
    }
}

/// Bytes of a request's head; a browser's is about one kilobyte. The least that hyper takes.
const HEAD_BYTES_MAX: usize = 8 * 1024;
/// How long answers in flight may take to finish when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// How long to wait after the system refused to accept a connection, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The running server. Dropping it stops it without waiting.
#[derive(Debug)]
pub struct Server {
    /// Where it listens: the port that was chosen when port 0 was asked for.
    pub addr: SocketAddr,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The address cannot be listened on.
    #[error(
        "http.listen = \"{listen}\" cannot be listened on: {error}; {}",
        if error.kind() == io::ErrorKind::AddrInUse {
            "another program uses the port: choose another one, or port 0 for any"
        } else {
            "choose an address of this machine and a port that this user may use"
        }
    )]
    Listen {
        /// The configured address.
        listen: SocketAddr,
        /// What the system said.
        error: io::Error,
    },
    /// The thread or its runtime could not be made.
    #[error("the HTTP server cannot start: {0}")]
    Start(io::Error),
}

impl Server {
    /// Listens and serves until stopped.
    ///
    /// # Errors
    /// When the address cannot be listened on or the system has no thread left.
    pub fn start(listen: SocketAddr, board: Board, metrics: Metrics) -> Result<Self, HttpError> {
        Self::start_with(listen, board, metrics, Limits::default())
    }

    /// [`Server::start`] with other limits.
    ///
    /// # Errors
    /// As for [`Server::start`].
    pub fn start_with(listen: SocketAddr, board: Board, metrics: Metrics, limits: Limits) -> Result<Self, HttpError> {
        let refused = |error| HttpError::Listen { listen, error };
        // Bound here, so that a port in use is the caller's error and not a line in the log.
        let listener = std::net::TcpListener::bind(listen).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let addr = listener.local_addr().map_err(refused)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(HttpError::Start)?;
        let stop = CancellationToken::new();
        let app = router(board, metrics);
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("http".to_owned())
            .spawn(move || {
                runtime.block_on(serve(listener, app, limits, stopped));
                runtime.shutdown_background();
            })
            .map_err(HttpError::Start)?;
        info!(%addr, "serving /metrics, /livez, /readyz and /status");
        Ok(Self { addr, stop, thread: Some(thread) })
    }

    /// Stops listening, lets answers in flight finish for up to a second, and waits for the thread. Blocks that long.
    pub fn stop(mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // A panic there was written by the panic hook; there is nothing left to undo.
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Accepts connections until stopped.
async fn serve(listener: std::net::TcpListener, app: Router, limits: Limits, stop: CancellationToken) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            warn!(%error, "the HTTP server cannot start");
            return;
        }
    };
    let mut connections = JoinSet::new();
    let mut by_age: VecDeque<AbortHandle> = VecDeque::new();
    let mut refusals = Repeats::new(REPEAT_EVERY, 1);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => by_age.retain(|handle| !handle.is_finished()),
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    if connections.len() >= limits.connections_max && let Some(oldest) = by_age.pop_front() {
                        oldest.abort();
                    }
                    by_age.push_back(connections.spawn(connection(stream, app.clone(), limits)));
                }
                Err(error) => {
                    if let Some(folded) = refusals.note((), Instant::now()) {
                        warn!(%error, folded, "a connection to http.listen was refused by the system");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    let finished = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(STOP_GRACE, finished).await;
}

/// Answers one request. Connections are not kept: a scrape every few seconds gains nothing, and idle ones would have to be bounded.
async fn connection(stream: TcpStream, app: Router, limits: Limits) {
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(HEAD_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    // A client that goes away or is too slow is no event of ours.
    let _ = tokio::time::timeout(limits.connection_timeout, connection).await;
}

#[derive(Clone)]
struct App {
    board: Board,
    metrics: Metrics,
}

fn router(board: Board, metrics: Metrics) -> Router {
    Router::new()
        .route("/", get(index))
        .route("/metrics", get(render))
        .route("/livez", get(livez))
        .route("/healthz", get(livez))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(map_response(guard))
        .with_state(App { board, metrics })
}

/// Headers of every answer: nothing may store, frame, sniff or embed what is served here.
async fn guard(mut response: Response) -> Response {
    const HEADERS: [(HeaderName, &str); 6] = [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn index() -> Html<&'static str> {
    Html(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>keiro-relay</title>\n<h1>keiro-relay</h1>\n<ul>\n\
         <li><a href=\"/status\">/status</a>: sources, dependencies, parked topics, what changed (JSON)\n\
         <li><a href=\"/readyz\">/readyz</a>: does it do its work, and why not (JSON; 200 or 503)\n\
         <li><a href=\"/livez\">/livez</a>: do its loops turn (JSON; 200 or 503)\n\
         <li><a href=\"/metrics\">/metrics</a>: Prometheus\n</ul>\n",
    )
}

async fn render(State(app): State<App>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    let mut response = Response::new(Body::from(app.metrics.render()));
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

async fn livez(State(app): State<App>) -> Response {
    let liveness = app.board.liveness();
    (verdict(liveness.live), Json(liveness)).into_response()
}

async fn readyz(State(app): State<App>) -> Response {
    let snapshot = app.board.snapshot();
    let readiness = snapshot.readiness(snapshot.at());
    (verdict(readiness.ready), Json(readiness)).into_response()
}

async fn status(State(app): State<App>) -> Response {
    Json(app.board.snapshot().status()).into_response()
}

async fn not_found(uri: Uri) -> Response {
    let error = format!("nothing is served at {}; see /", uri.path());
    (StatusCode::NOT_FOUND, Json(serde_json::json!({ "error": error }))).into_response()
}

async fn method_not_allowed() -> Response {
    let error = "read-only: GET and HEAD are all there is";
    (StatusCode::METHOD_NOT_ALLOWED, Json(serde_json::json!({ "error": error }))).into_response()
}

fn verdict(fine: bool) -> StatusCode {
    if fine { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}
