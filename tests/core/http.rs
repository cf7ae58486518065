//! The HTTP server as a client sees it: raw bytes over loopback, bad clients included.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use keiro_relay::cli::health;
use keiro_relay::domain::policy::Policy;
use keiro_relay::http::{HttpError, Limits, Server};
use keiro_relay::relay::health::{Board, Identity, LoopName, Moment, SourceSample};
use keiro_relay::telemetry::Metrics;

use crate::health::Scene;

const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// Longest wait for something that must happen; far above what it takes.
const PATIENCE: Duration = Duration::from_secs(20);

fn start(scene: &Scene) -> Server {
    Server::start(ANY_PORT, scene.board.clone(), scene.board.metrics().clone()).expect("a free port")
}

fn start_with(limits: Limits) -> Server {
    let scene = Scene::working();
    Server::start_with(ANY_PORT, scene.board.clone(), scene.board.metrics().clone(), limits).expect("a free port")
}

fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    stream.set_write_timeout(Some(PATIENCE)).expect("a socket");
    stream
}

/// Everything until the server ends the connection.
fn read_all(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
    String::from_utf8(bytes).expect("UTF-8")
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    fn json(&self) -> serde_json::Value {
        assert_eq!(self.header("content-type"), Some("application/json"), "{}", self.head);
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

fn request(addr: SocketAddr, method: &str, path: &str) -> Answer {
    let mut stream = connect(addr);
    write!(stream, "{method} {path} HTTP/1.1\r\nhost: relay\r\n\r\n").expect("the server reads");
    let answer = read_all(stream);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {answer:?}"));
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{head}"));
    Answer { status, head: head.to_owned(), body: body.to_owned() }
}

fn get(addr: SocketAddr, path: &str) -> Answer {
    request(addr, "GET", path)
}

#[test]
fn every_page_answers_with_its_type_and_strict_headers() {
    let scene = Scene::working();
    let server = start(&scene);
    for (path, status, kind) in [
        ("/", 200, "text/html; charset=utf-8"),
        ("/metrics", 200, "text/plain; version=0.0.4; charset=utf-8"),
        ("/livez", 200, "application/json"),
        ("/healthz", 200, "application/json"),
        ("/readyz", 200, "application/json"),
        ("/readyz?verbose=1", 200, "application/json"),
        ("/status", 200, "application/json"),
        ("/nothing", 404, "application/json"),
        ("/status/", 404, "application/json"),
        ("/../etc/passwd", 404, "application/json"),
    ] {
        let answer = get(server.addr, path);
        assert_eq!(answer.status, status, "{path}");
        assert_eq!(answer.header("content-type"), Some(kind), "{path}");
        assert!(!answer.body.is_empty(), "{path}");
        for (name, value) in [
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
            ("x-frame-options", "DENY"),
            ("referrer-policy", "no-referrer"),
            ("cross-origin-resource-policy", "same-origin"),
        ] {
            assert_eq!(answer.header(name), Some(value), "{path}");
        }
        let policy = answer.header("content-security-policy").unwrap_or_default();
        assert!(policy.starts_with("default-src 'none'"), "{path}: {policy}");
    }
    assert_eq!(get(server.addr, "/nothing").json()["error"], "nothing is served at /nothing; see /");
    server.stop();
}

#[test]
fn nothing_but_get_and_head_is_answered() {
    let scene = Scene::working();
    let server = start(&scene);
    for path in ["/", "/metrics", "/livez", "/healthz", "/readyz", "/status"] {
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"] {
            let answer = request(server.addr, method, path);
            assert_eq!(answer.status, 405, "{method} {path}");
            assert_eq!(answer.header("allow"), Some("GET,HEAD"), "{method} {path}");
            assert_eq!(answer.json()["error"], "read-only: GET and HEAD are all there is", "{method} {path}");
            assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{method} {path}");
        }
        let head = request(server.addr, "HEAD", path);
        assert_eq!((head.status, head.body.as_str()), (200, ""), "HEAD {path}");
        assert!(head.header("content-length").is_some_and(|length| length != "0"), "HEAD {path}: {}", head.head);
    }
    assert_eq!(request(server.addr, "POST", "/nothing").status, 404);
}

#[test]
fn readyz_and_livez_follow_the_board() {
    let scene = Scene::new();
    let server = start(&scene);
    let answer = get(server.addr, "/readyz");
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["ready"], false);
    assert_eq!(
        answer.json()["reasons"][0],
        serde_json::json!({
            "check": "database", "reason": "the database has not been checked yet", "since": "2026-01-02T03:04:05.000Z"
        })
    );
    scene.board.database(Ok(()));
    scene.board.broker(None);
    scene.board.schema(Ok("lean profile".into()));
    assert_eq!(get(server.addr, "/readyz").status, 200);
    assert_eq!(get(server.addr, "/readyz").json()["checks"]["database"]["state"], "ok");
    scene.board.broker(Some("kafka.all_brokers_down: no broker of kafka.brokers answers".into()));
    let answer = get(server.addr, "/readyz");
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["reasons"][0]["reason"], "kafka.all_brokers_down: no broker of kafka.brokers answers");
    assert_eq!(get(server.addr, "/livez").status, 200, "the broker is no reason to be restarted");

    let watched = scene.board.register(LoopName::Source, Some("billing"), Duration::from_secs(1));
    scene.pass(60);
    for path in ["/livez", "/healthz"] {
        let answer = get(server.addr, path);
        assert_eq!(answer.status, 503, "{path}");
        assert_eq!(
            answer.json(),
            serde_json::json!({ "live": false, "loops": 1, "stuck": [
                { "loop": "source", "detail": "billing", "silent_seconds": 60, "silent_seconds_max": 10 }
            ]})
        );
    }
    watched.tick();
    assert_eq!(get(server.addr, "/livez").json(), serde_json::json!({ "live": true, "loops": 1, "stuck": [] }));
}

#[test]
fn status_and_metrics_show_the_same_backlog() {
    let scene = Scene::working();
    let server = start(&scene);
    scene.board.sampled(vec![SourceSample {
        source: "billing".into(),
        policy: Some(Policy::StopTheLine),
        pending: 7,
        ..SourceSample::default()
    }]);
    let status = get(server.addr, "/status").json();
    assert_eq!((&status["instance"], &status["version"]), (&"relay-1".into(), &"0.1.0".into()));
    assert_eq!(status["ready"]["ready"], true);
    assert_eq!(status["sources"][0]["policy"], "stop_the_line");
    assert_eq!(status["sources"][0]["pending"], 7);
    let metrics = get(server.addr, "/metrics").body;
    assert!(metrics.contains("\nkeiro_relay_backlog_rows{source=\"billing\",status=\"pending\"} 7\n"), "{metrics}");
    assert!(metrics.contains("\nkeiro_relay_policy_info{hash=\"abc\"} 1\n"), "{metrics}");
}

#[test]
fn a_port_in_use_is_an_error_that_names_the_setting() {
    let taken = TcpListener::bind(ANY_PORT).expect("a free port");
    let addr = taken.local_addr().expect("an address");
    let scene = Scene::working();
    let error = Server::start(addr, scene.board.clone(), Metrics::new()).expect_err("the port is taken");
    assert!(matches!(&error, HttpError::Listen { listen, .. } if *listen == addr), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with(&format!("http.listen = \"{addr}\" cannot be listened on: ")), "{text}");
    assert!(text.ends_with("another program uses the port: choose another one, or port 0 for any"), "{text}");
    drop(taken);
    // Not an address of this machine (TEST-NET-1).
    let foreign = "192.0.2.1:9464".parse().expect("an address");
    let error = Server::start(foreign, scene.board.clone(), Metrics::new()).expect_err("not ours").to_string();
    assert!(error.ends_with("choose an address of this machine and a port that this user may use"), "{error}");
}

#[test]
fn clients_that_hold_connections_open_do_not_keep_others_from_being_answered() {
    // Timeouts that nobody waits for here: only the cap may help.
    let limits = Limits { connections_max: 8, head_timeout: PATIENCE * 10, connection_timeout: PATIENCE * 10 };
    let server = start_with(limits);
    let mut slow: Vec<TcpStream> = Vec::new();
    for n in 0..200 {
        let mut stream = connect(server.addr);
        let head = ["", "GET", "GET /livez HTTP/1.1\r\nx-a: b\r\n"][n % 3];
        stream.write_all(head.as_bytes()).expect("sent");
        slow.push(stream);
        if n % 20 == 0 {
            assert_eq!(get(server.addr, "/livez").status, 200, "behind {n} slow clients");
        }
    }
    assert_eq!(get(server.addr, "/readyz").status, 200);
    // All but the last few were ended by the server, so it holds a bounded number: reading them comes to an end.
    for stream in slow.drain(..200 - limits.connections_max) {
        assert_eq!(read_all(stream), "");
    }
}

#[test]
fn a_client_that_sends_its_head_slowly_is_dropped() {
    let limits =
        Limits { head_timeout: Duration::from_millis(200), connection_timeout: PATIENCE * 10, ..Limits::default() };
    let server = start_with(limits);
    let mut trickle = connect(server.addr);
    let silent = connect(server.addr);
    let began = Instant::now();
    // A byte now and then does not prolong it. The pause paces the client; the end is the server's.
    let ended = loop {
        if trickle.write_all(b"G").is_err() || peeked_end(&trickle) {
            break true;
        }
        if began.elapsed() > PATIENCE {
            break false;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(ended, "still open after {PATIENCE:?}");
    read_all(silent);
    assert!(began.elapsed() < PATIENCE);
}

/// Whether the server has ended the connection.
fn peeked_end(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a socket");
    let ended = match stream.peek(&mut [0]) {
        Ok(_) => true,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    };
    stream.set_nonblocking(false).expect("a socket");
    ended
}

#[test]
fn a_client_that_does_not_read_its_answer_is_dropped() {
    let scene = Scene::working();
    for n in 0..800 {
        // About 5 MB of metrics: more than the sockets' buffers hold.
        let _ = scene.board.metrics().source(&format!("{n}{}", "s".repeat(200)));
    }
    let limits = Limits { connection_timeout: Duration::from_millis(500), ..Limits::default() };
    let board = scene.board.clone();
    let server = Server::start_with(ANY_PORT, board, scene.board.metrics().clone(), limits).expect("a free port");
    let mut stuck = connect(server.addr);
    write!(stuck, "GET /metrics HTTP/1.1\r\nhost: relay\r\n\r\n").expect("sent");
    // Dropped by the server: the answer it began is cut off, whenever it is read.
    let ended = wait_until(|| get(server.addr, "/livez").status == 200 && closed_by_peer(server.addr, &stuck));
    assert!(ended, "still open");
    let cut = read_lossy(stuck);
    let (head, body) = cut.split_once("\r\n\r\n").expect("a head");
    let promised: usize = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .and_then(|length| length.parse().ok())
        .expect("a length");
    assert!(body.len() < promised, "all {promised} bytes came: the answer is too small for this test");
}

/// Whether the server's side of a connection is gone from the kernel's table (its state is not ESTABLISHED any more).
fn closed_by_peer(server: SocketAddr, client: &TcpStream) -> bool {
    let client = client.local_addr().expect("an address");
    let table = std::fs::read_to_string("/proc/self/net/tcp").expect("Linux");
    let (from, to) = (format!(":{:04X}", server.port()), format!(":{:04X}", client.port()));
    !table.lines().skip(1).any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words[1].ends_with(&from) && words[2].ends_with(&to) && words[3] == "01"
    })
}

fn read_lossy(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn wait_until(mut done: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

#[test]
fn what_is_no_http_or_too_long_is_refused_and_the_next_client_is_served() {
    let scene = Scene::working();
    let server = start(&scene);
    let long = format!("GET /{} HTTP/1.1\r\nhost: relay\r\n\r\n", "a".repeat(100_000));
    let many = format!("GET /livez HTTP/1.1\r\n{}\r\n", "x-a: b\r\n".repeat(2_000));
    let garbage = "\u{0}\u{1}\u{2}hello\r\n\r\n".to_owned();
    let tls = "\u{16}\u{3}\u{1}\u{2}\u{0}".to_owned() + &"x".repeat(300) + "\r\n\r\n";
    let body = format!("GET /livez HTTP/1.1\r\nhost: relay\r\ncontent-length: {}\r\n\r\nabc", usize::MAX);
    for sent in [long, many, garbage, tls, body] {
        let mut stream = connect(server.addr);
        // The server may end the connection while it is still being talked to.
        let _ = stream.write_all(sent.as_bytes());
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let answer = read_lossy(stream);
        let refused = answer.is_empty() || answer.starts_with("HTTP/1.1 4");
        assert!(refused || sent.contains("content-length"), "{answer:?} to {:?}", &sent[..20]);
        assert_eq!(get(server.addr, "/livez").status, 200);
    }
}

#[test]
fn it_answers_until_it_is_stopped_and_then_frees_its_port() {
    let scene = Scene::working();
    let server = start(&scene);
    let addr = server.addr;
    scene.board.stopping();
    assert_eq!(get(addr, "/livez").status, 200);
    assert_eq!(get(addr, "/readyz").status, 503);
    // A connection held open does not hold up the stop for longer than its grace.
    let _idle = connect(addr);
    let began = Instant::now();
    server.stop();
    assert!(began.elapsed() < PATIENCE);
    TcpListener::bind(addr).expect("the port is free again");
    let error = health::check(addr, false, Duration::from_secs(1)).expect_err("nobody listens");
    assert!(error.starts_with(&format!("no answer from http://{addr}/livez: ")), "{error}");
}

#[test]
fn it_answers_while_the_runtime_of_the_relay_is_stuck() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let answer = runtime.block_on(async {
        let identity = Identity { instance: "r".into(), version: "0".into(), policy_hash: "h".into() };
        let limits = keiro_relay::relay::health::Limits::of_timeouts(PATIENCE, PATIENCE);
        let board = Board::with_clock(identity, limits, Metrics::new(), Moment::now);
        let server = Server::start(ANY_PORT, board.clone(), Metrics::new()).expect("a free port");
        // Blocks the only thread of this runtime.
        get(server.addr, "/livez").status
    });
    assert_eq!(answer, 200);
}

#[test]
fn the_health_command_asks_over_http_and_never_waits_for_ever() {
    let scene = Scene::new();
    let server = start(&scene);
    let alive = health::check(server.addr, false, PATIENCE).expect("an answer");
    assert!(alive.fine && alive.status == 200 && alive.body.contains("\"live\":true"), "{alive:?}");
    let ready = health::check(server.addr, true, PATIENCE).expect("an answer");
    assert!(!ready.fine && ready.status == 503 && ready.body.contains("has not been checked yet"), "{ready:?}");

    // Listening on every interface, asked over loopback.
    let every =
        Server::start("0.0.0.0:0".parse().expect("an address"), scene.board.clone(), Metrics::new()).expect("a port");
    assert!(health::check(every.addr, false, PATIENCE).expect("an answer").fine);

    let error = health::check(ANY_PORT, false, PATIENCE).expect_err("no port");
    assert!(error.starts_with("http.listen has port 0"), "{error}");

    // Accepts and says nothing, or something else, or a little of it again and again.
    let mute = TcpListener::bind(ANY_PORT).expect("a free port");
    let addr = mute.local_addr().expect("an address");
    let error = health::check(addr, false, Duration::from_millis(200)).expect_err("no answer");
    assert!(error.contains("it took too long"), "{error}");
    let other = std::thread::spawn(move || {
        // The first in its queue is the client that gave up above.
        for answer in ["", "220 mail ready\r\n\r\n", "HTTP/1.1 two hundred\r\n\r\n"] {
            let (mut stream, _) = mute.accept().expect("a client");
            // The request first: ending a connection with unread bytes would reset it.
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(answer.as_bytes());
        }
        let (mut stream, _) = mute.accept().expect("a client");
        while stream.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    for _ in 0..2 {
        let error = health::check(addr, false, PATIENCE).expect_err("not HTTP");
        assert!(error.contains("the answer is not HTTP"), "{error}");
    }
    let error = health::check(addr, false, Duration::from_millis(300)).expect_err("endless");
    assert!(error.contains("it took too long"), "{error}");
    other.join().expect("the other server ends with its last client");
}
