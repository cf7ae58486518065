//! What the demo shows: its story line by line, progress while rows move, and the table at the end.
//!
//! Nothing here ever fails because nobody reads any more, and nothing is wider than 100 columns.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Columns of a line.
const COLUMNS: usize = 100;
/// Pause between two lines of progress when nobody watches a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// The one who tells the story.
pub(super) struct Show {
    /// Standard output is for one JSON object; the story goes to standard error.
    json: bool,
    steps: Mutex<usize>,
    progress: Mutex<Option<Progress>>,
}

struct Progress {
    started: Instant,
    last_line: Option<(Instant, String)>,
    /// On a terminal: a bar for each source.
    bars: Option<(MultiProgress, Vec<ProgressBar>)>,
}

/// How far one source is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Standing {
    pub name: &'static str,
    pub rows: usize,
    pub written: usize,
    /// Read back from its topics.
    pub relayed: usize,
    pub halted: bool,
}

impl Show {
    pub(super) fn new(json: bool) -> Self {
        Self { json, steps: Mutex::new(0), progress: Mutex::new(None) }
    }

    /// A numbered step of the story.
    pub(super) fn step(&self, text: &str) {
        let mut steps = self.steps.lock().expect("no code panics while it holds this lock");
        *steps += 1;
        self.print(&wrapped(&format!("{steps}. "), "   ", text));
    }

    /// What comes of a step.
    pub(super) fn say(&self, text: &str) {
        self.print(&wrapped("   ", "   ", text));
    }

    /// A paragraph of its own.
    pub(super) fn paragraph(&self, text: &str) {
        self.print(&wrapped("", "", text));
    }

    /// Lines that are laid out already.
    pub(super) fn lines(&self, lines: &str) {
        self.print(lines);
    }

    fn print(&self, lines: &str) {
        let print = || {
            // A reader that went away is no failure.
            let _ = if self.json { writeln!(io::stderr(), "{lines}") } else { writeln!(io::stdout(), "{lines}") };
        };
        match &*self.progress() {
            Some(Progress { bars: Some((bars, _)), .. }) => bars.suspend(print),
            Some(Progress { bars: None, .. }) | None => print(),
        }
    }

    /// Begins to show how far the sources are.
    pub(super) fn begin_progress(&self, standings: &[Standing]) {
        let is_terminal = if self.json { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
        let bars = is_terminal.then(|| {
            let target = if self.json { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::stdout() };
            let bars = MultiProgress::with_draw_target(target);
            let style = ProgressStyle::with_template("   {prefix:8} {bar:30} {pos:>9} of {len:9} on Kafka {msg}")
                .expect("the template is right")
                .progress_chars("█▉ ");
            let bar = |standing: &Standing| {
                let bar = bars.add(ProgressBar::new(standing.rows as u64).with_style(style.clone()));
                bar.set_prefix(standing.name);
                bar
            };
            let each = standings.iter().map(bar).collect();
            (bars, each)
        });
        *self.progress() = Some(Progress { started: Instant::now(), last_line: None, bars });
    }

    /// Shows how far the sources are.
    pub(super) fn progress_of(&self, standings: &[Standing]) {
        let mut progress = self.progress();
        let Some(Progress { started, last_line, bars }) = &mut *progress else { return };
        if let Some((_, bars)) = bars {
            for (bar, standing) in bars.iter().zip(standings) {
                bar.set_position(standing.relayed as u64);
                bar.set_message(match standing {
                    Standing { halted: true, .. } => "HALTED".to_owned(),
                    Standing { written, rows, .. } if written < rows => format!("({} written)", grouped(*written)),
                    _ => String::new(),
                });
            }
            return;
        }
        let written: usize = standings.iter().map(|standing| standing.written).sum();
        let each: Vec<String> = standings
            .iter()
            .map(|Standing { name, relayed, halted, .. }| {
                format!("{name} {}{}", grouped(*relayed), if *halted { " HALTED" } else { "" })
            })
            .collect();
        let text = format!("written {}; on Kafka: {}", grouped(written), each.join(", "));
        let now = Instant::now();
        let news = last_line.as_ref().is_none_or(|(at, last)| now - *at >= LINE_INTERVAL && *last != text);
        if news {
            let line = format!("   {:6.1} s  {text}", started.elapsed().as_secs_f64());
            let _ = if self.json { writeln!(io::stderr(), "{line}") } else { writeln!(io::stdout(), "{line}") };
            *last_line = Some((now, text));
        }
    }

    /// Leaves the last state as it is and goes on with the story.
    pub(super) fn end_progress(&self) {
        if let Some(Progress { bars: Some((_, bars)), .. }) = self.progress().take() {
            for bar in bars {
                bar.abandon();
            }
        }
    }

    fn progress(&self) -> std::sync::MutexGuard<'_, Option<Progress>> {
        self.progress.lock().expect("no code panics while it holds this lock")
    }
}

/// Breaks a text into lines of at most [`COLUMNS`] columns between its words.
fn wrapped(first: &str, next: &str, text: &str) -> String {
    let mut lines = String::new();
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            lines.push_str(&line);
            lines.push('\n');
            next.clone_into(&mut line);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    lines + &line
}

/// A number with its thousands apart: `12,345`.
pub(in crate::cli) fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A table as text: the first `left` columns to the left, numbers to the right.
pub(super) fn table(heads: &[&str], rows: &[Vec<String>], left: usize) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([heads[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let cells: Vec<String> = cells
            .iter()
            .zip(&widths)
            .enumerate()
            .map(
                |(column, (cell, width))| {
                    if column < left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                },
            )
            .collect();
        format!("   {}", cells.join("  ").trim_end())
    };
    let mut lines = vec![line(heads.to_vec())];
    lines.extend(rows.iter().map(|row| line(row.iter().map(String::as_str).collect())));
    lines.join("\n")
}
