//! `keiro-relay health`: asks a running relay over HTTP whether it is alive or ready.
//!
//! Nothing here ever contacts the database or the broker, and nothing waits longer than it was told.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long the command waits in all.
pub const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest answer that is read; a verdict is a few hundred bytes, the status of ten thousand sources some megabytes.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// What the relay said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Whether it is alive (or ready, when that was asked).
    pub fine: bool,
    /// HTTP status.
    pub status: u16,
    /// The body: JSON with every reason.
    pub body: String,
}

/// Asks `/livez` (or `/readyz`) of the relay that listens on `listen`; an address of all interfaces is asked over loopback.
///
/// # Errors
/// Says that there is no answer, from where, and what to look at.
pub fn check(listen: SocketAddr, ready: bool, timeout: Duration) -> Result<Answer, String> {
    get(listen, if ready { "/readyz" } else { "/livez" }, timeout)
}

/// Asks the relay that listens on `listen` for a path, as [`check`] does.
pub(super) fn get(listen: SocketAddr, path: &str, timeout: Duration) -> Result<Answer, String> {
    let address = reachable(listen);
    if address.port() == 0 {
        return Err(
            "http.listen has port 0, so the port of the running relay is not known; configure a port".to_owned()
        );
    }
    ask(address, path, timeout).map_err(|error| {
        format!("no answer from http://{address}{path}: {error}; is the relay running, with this http.listen?")
    })
}

/// What the relay that listens on `listen` says of itself on `/status`.
///
/// # Errors
/// As [`check`], and when somebody else answers.
pub(super) fn status(listen: SocketAddr, timeout: Duration) -> Result<Value, String> {
    let answer = get(listen, "/status", timeout)?;
    let status: Option<Value> = serde_json::from_str(&answer.body).ok();
    let of_a_relay = |status: &Value| status["policy_hash"].is_string();
    status.filter(of_a_relay).ok_or_else(|| format!("what answers on http.listen ({listen}) is no keiro-relay"))
}

/// Asks for a path; `timeout` bounds all of it.
pub(super) fn ask(address: SocketAddr, path: &str, timeout: Duration) -> io::Result<Answer> {
    let deadline = Instant::now() + timeout;
    let mut stream = TcpStream::connect_timeout(&address, timeout)?;
    stream.set_write_timeout(Some(left(deadline)?))?;
    // In one write: formatted into the socket it would leave in pieces.
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    let mut chunk = [0; 4096];
    // A read timeout bounds one read only: what is left of the whole is set before each.
    while (answer.len() as u64) < ANSWER_BYTES_MAX {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => answer.extend_from_slice(&chunk[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(too_late()),
            Err(error) => return Err(error),
        }
    }
    parse(&String::from_utf8_lossy(&answer))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the answer is not HTTP"))
}

/// Time left until the deadline, never zero: the system takes that for no timeout at all.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(too_late()) } else { Ok(left) }
}

fn too_late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it took too long")
}

/// Status and body of an answer whose end is the end of the connection.
fn parse(answer: &str) -> Option<Answer> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let mut words = head.lines().next()?.split(' ');
    if !words.next()?.starts_with("HTTP/1.") {
        return None;
    }
    let status = words.next()?.parse().ok()?;
    Some(Answer { fine: status == 200, status, body: body.trim_end().to_owned() })
}

/// The address to connect to for an address to listen on.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}
