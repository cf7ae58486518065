//! Rows as text for people and as JSON for programs: escaped, cut to a width, with ages.
//!
//! Nothing here ever writes a control character of the table to a terminal, not even inside JSON.

use serde::Serialize;

use crate::domain::message::PgTime;

/// From here on a waiting row is held for an operator (`on_halt = "hold"`).
pub const HELD_FROM: PgTime = PgTime(220_898_707_200_000_000);
/// From here on a row counts as finished.
pub const FAR_FROM: PgTime = PgTime(252_424_080_000_000_000);

/// One JSON object as a line. What a terminal could obey is escaped: inside JSON such characters stand in strings only.
#[must_use]
pub fn json_line(value: &impl Serialize) -> String {
    let text = serde_json::to_string(value).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"));
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe(c) {
            // All of them lie in the basic plane.
            line.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            line.push(c);
        }
    }
    line
}

/// A text of the table for a terminal.
#[must_use]
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe(c) { escaped.extend(c.escape_default()) } else { escaped.push(c) }
    }
    escaped
}

/// The same, no longer than so many characters.
#[must_use]
pub fn cut(text: &str, width: usize) -> String {
    let mut short = escaped(&text.chars().take(width + 1).collect::<String>());
    if short.chars().count() > width {
        short = short.chars().take(width.saturating_sub(1)).chain(['…']).collect();
    }
    short
}

/// What ends a line, moves the cursor, or turns text around.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// A span in one unit, at most four characters for a human life: `12s`, `45m`, `3h`, `12d`, `4y`.
#[must_use]
pub fn span(micros: i64) -> String {
    const UNITS: [(i64, &str); 4] = [(365 * 86_400, "y"), (86_400, "d"), (3600, "h"), (60, "m")];
    let seconds = micros / 1_000_000;
    let unit = UNITS.iter().find(|(length, _)| seconds >= *length);
    unit.map_or_else(|| format!("{seconds}s"), |(length, name)| format!("{}{name}", seconds / length))
}

/// How long ago, or in how long: `3m ago`, `in 5m`; what lies at the end of time has no span.
#[must_use]
pub fn distance(now: PgTime, at: PgTime) -> String {
    match at {
        PgTime::INFINITY => "never".to_owned(),
        PgTime::NEG_INFINITY => "always".to_owned(),
        at if at > now => format!("in {}", span(at.0.saturating_sub(now.0))),
        at => format!("{} ago", span(now.0.saturating_sub(at.0))),
    }
}

/// An instant and how far it is: `2026-01-02T03:04:05Z (3m ago)`.
#[must_use]
pub fn instant(now: PgTime, at: PgTime) -> String {
    match at {
        PgTime::INFINITY | PgTime::NEG_INFINITY => at.to_string(),
        // Seconds are enough for people.
        at => format!("{} ({})", PgTime(at.0 - at.0.rem_euclid(1_000_000)), distance(now, at)),
    }
}

/// Breaks a paragraph into lines of at most so many characters; a longer word has a line of its own.
#[must_use]
pub fn wrapped(text: &str, width: usize) -> String {
    let mut lines = String::with_capacity(text.len());
    let mut column = 0;
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > width {
            lines.push('\n');
            column = 0;
        } else if column > 0 {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += length;
    }
    lines
}
