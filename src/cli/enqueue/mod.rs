//! `keiro-relay enqueue`: rows as JSON objects, one a line, written in one transaction or in batches.
//!
//! Nothing here ever holds more of the input in memory than a batch, and a transaction is never open while somebody else's output is
//! waited for: what is to be written in one transaction is read to its end, and checked, first. No value of a line ever reaches an
//! error.

mod line;

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, IsTerminal as _, Seek as _, Write};
use std::time::Duration;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use tokio_postgres::types::Type;
use uuid::Uuid;

pub use line::{LineProblem, Lines};

use super::{EXIT_CONFIG, EXIT_FAILED, EXIT_OK};
use crate::producer::{EnqueueError, Enqueued, Limits, NewRow, OnDuplicate, Outbox};
use crate::store::{self, Db, EnqueueFailure, ErrorKind, StoreError, Tx, qualified};

/// Most lines of `--batch`.
pub const BATCH_LINES_MAX: u32 = 10_000;
/// Rows and octets of one statement.
const CHUNK_ROWS_MAX: usize = 500;
const CHUNK_OCTETS_MAX: usize = 4 << 20;
/// Octets after which a batch is committed although it has not all its lines.
const BATCH_OCTETS_MAX: usize = 64 << 20;
/// Up to here the input, and the answers, of one transaction are kept in memory; beyond it in a file.
const SPOOL_MEMORY_OCTETS: usize = 8 << 20;
/// Problems that are printed one by one; the rest is counted.
const PROBLEMS_SHOWN_MAX: usize = 1_000;
/// Sources of a transaction that are woken by name; with more, all are.
const SOURCES_WOKEN_MAX: usize = 256;

/// `--on-duplicate`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum OnDuplicateName {
    /// Not written again, whatever it holds.
    Coalesce,
    /// Not written again when it is the same; a different one is an error that names the columns.
    AcceptIdentical,
    /// An error.
    Reject,
}

impl From<OnDuplicateName> for OnDuplicate {
    fn from(name: OnDuplicateName) -> Self {
        match name {
            OnDuplicateName::AcceptIdentical => Self::AcceptIdentical,
            OnDuplicateName::Coalesce => Self::Coalesce,
            OnDuplicateName::Reject => Self::Reject,
        }
    }
}

/// What is to be done.
#[derive(Debug)]
pub struct Job<'a> {
    /// Schema of the table.
    pub schema: &'a str,
    /// Its name.
    pub table: &'a str,
    /// Longest wait for any statement.
    pub bound: Duration,
    /// Limits of a row.
    pub limits: Limits,
    /// What to do with rows that are there already.
    pub on_duplicate: OnDuplicate,
    /// Commit every so many lines; `None` is one transaction for all.
    pub batch: Option<usize>,
    /// Shows how far it is; hidden where nobody looks.
    pub progress: ProgressBar,
}

/// Runs the command and returns its exit code: 0 when every row is in the table.
///
/// # Errors
/// Only those of the two outputs.
pub async fn run(
    db: &Db,
    job: &Job<'_>,
    input: impl BufRead,
    out: &mut (impl Write + Send),
    err: &mut (impl Write + Send),
) -> io::Result<u8> {
    let outbox = match Outbox::new(job.schema, job.table) {
        Ok(outbox) => outbox.on_duplicate(job.on_duplicate).limits(job.limits),
        Err(bad) => {
            writeln!(err, "enqueue: nothing was inserted: {bad}")?;
            return Ok(EXIT_CONFIG);
        }
    };
    let writer = Writer { db, job, outbox: &outbox };
    let code = match job.batch {
        None => writer.all_or_nothing(input, out, err).await,
        Some(lines) => writer.in_batches(input, lines, out, err).await,
    };
    job.progress.finish_and_clear();
    code
}

/// A bar on standard error when that is a terminal and the input is not typed there; hidden otherwise.
#[must_use]
pub fn progress() -> ProgressBar {
    if io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    ProgressBar::new_spinner()
}

/// Counts lines of which nobody knows how many there are.
const COUNTING: &str = "{spinner} {human_pos} lines {msg} ({rate})";
/// Counts lines up to the last.
const MEASURING: &str = "{bar:30} {human_pos} of {human_len} lines {msg} ({rate}, {eta} to go)";

fn style(template: &str) -> ProgressStyle {
    let rate = |state: &ProgressState, text: &mut dyn std::fmt::Write| {
        // Writing to the bar's text cannot fail.
        let _ = write!(text, "{:.0} a second", state.per_sec());
    };
    let style = ProgressStyle::with_template(template).expect("the template is right");
    style.with_key("rate", rate).progress_chars("█▉ ")
}

/// What is printed for a line.
#[derive(serde::Serialize)]
struct Answer<'a> {
    line: usize,
    outbox_id: Uuid,
    message_id: &'a str,
    inserted: bool,
}

fn answer(out: &mut impl Write, numbers: &[usize], enqueued: &[Enqueued]) -> io::Result<()> {
    for (&line, Enqueued { outbox_id, message_id, inserted }) in numbers.iter().zip(enqueued) {
        let answer = Answer { line, outbox_id: *outbox_id, message_id, inserted: *inserted };
        serde_json::to_writer(&mut *out, &answer)?;
        writeln!(out)?;
    }
    Ok(())
}

/// Prints the problems of lines as they are found, and counts them.
#[derive(Default)]
struct Problems {
    count: usize,
}

impl Problems {
    fn print(&mut self, found: &[LineProblem], err: &mut impl Write) -> io::Result<()> {
        for problem in found {
            self.count += 1;
            if self.count <= PROBLEMS_SHOWN_MAX {
                writeln!(err, "enqueue: {problem}")?;
            }
        }
        Ok(())
    }

    fn counted(&self) -> String {
        let hidden = self.count.saturating_sub(PROBLEMS_SHOWN_MAX);
        let noun = if self.count == 1 { "problem" } else { "problems" };
        if hidden == 0 {
            format!("{} {noun}", self.count)
        } else {
            format!("{} {noun}, {hidden} not shown", self.count)
        }
    }
}

/// Why rows were not written.
enum Failure {
    /// Nothing of this transaction is in the table: what the rows are, or what is there already.
    Refused(Vec<LineProblem>),
    /// Nothing of it is in the table: the database.
    Store(StoreError),
    /// The commit got no answer; the id is one of the rows that would have been inserted.
    Unknown { error: StoreError, outbox_id: Uuid },
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

struct Writer<'a> {
    db: &'a Db,
    job: &'a Job<'a>,
    outbox: &'a Outbox,
}

impl Writer<'_> {
    async fn all_or_nothing(
        &self,
        mut input: impl BufRead,
        out: &mut (impl Write + Send),
        err: &mut (impl Write + Send),
    ) -> io::Result<u8> {
        // Read to its end before the transaction begins: `created_at` is that beginning, and the server ends transactions that idle.
        let progress = &self.job.progress;
        progress.set_style(style(COUNTING));
        progress.set_message("read");
        let mut spool = tempfile::spooled_tempfile(SPOOL_MEMORY_OCTETS);
        if let Err(error) = copy(&mut input, &mut spool, progress) {
            writeln!(err, "enqueue: nothing was inserted: the input cannot be kept in {}: {error}", temporary())?;
            return Ok(EXIT_FAILED);
        }
        spool.rewind()?;
        let (mut problems, mut count) = (Problems::default(), 0);
        for line in Lines::new(BufReader::new(&mut spool), self.job.limits) {
            count += 1;
            if let Err(found) = line {
                progress.suspend(|| problems.print(&found, err))?;
            }
        }
        if problems.count > 0 {
            progress.finish_and_clear();
            writeln!(err, "enqueue: nothing was inserted: {}", problems.counted())?;
            return Ok(EXIT_FAILED);
        }
        if count == 0 {
            return Ok(EXIT_OK);
        }
        spool.rewind()?;
        progress.reset();
        progress.set_style(style(MEASURING));
        progress.set_message("written");
        progress.set_length(count);
        let mut answers = tempfile::spooled_tempfile(SPOOL_MEMORY_OCTETS);
        let written = self.write(Lines::new(BufReader::new(spool), self.job.limits), &mut answers).await;
        progress.finish_and_clear();
        match written {
            Ok(()) => {
                answers.rewind()?;
                io::copy(&mut answers, out)?;
                out.flush()?;
                Ok(EXIT_OK)
            }
            Err(failure) => {
                report(&failure, "nothing was inserted", "whether the rows were inserted is not known", err)
            }
        }
    }

    /// Writes all of these lines in one transaction, and what became of each to `answers`.
    async fn write<R: BufRead>(&self, lines: Lines<R>, answers: &mut impl Write) -> Result<(), Failure> {
        let mut transaction = Transaction::begin(self).await?;
        let mut chunk = Chunk::default();
        for line in lines {
            let (number, row) = line.map_err(Failure::Refused)?;
            if chunk.is_full() {
                transaction.write(&mut chunk, answers).await?;
            }
            chunk.push(number, row);
        }
        transaction.write(&mut chunk, answers).await?;
        transaction.commit().await
    }

    async fn in_batches(
        &self,
        input: impl BufRead,
        lines_max: usize,
        out: &mut (impl Write + Send),
        err: &mut (impl Write + Send),
    ) -> io::Result<u8> {
        let mut lines = Lines::new(input, self.job.limits);
        let progress = &self.job.progress;
        progress.set_style(style(COUNTING));
        progress.set_message("written");
        let mut out = Some(out);
        // The last line that is in the table.
        let mut done = 0;
        loop {
            let (mut batch, mut problems) = (Chunk::default(), Problems::default());
            let mut ended = true;
            for line in lines.by_ref() {
                match line {
                    Ok((number, row)) => batch.push(number, row),
                    Err(found) => {
                        problems.print(&found, err)?;
                        break;
                    }
                }
                if batch.rows.len() >= lines_max || batch.octets >= BATCH_OCTETS_MAX {
                    ended = false;
                    break;
                }
            }
            if problems.count > 0 {
                // The rest is only looked at, so that all problems are known at once.
                for found in lines.filter_map(Result::err) {
                    problems.print(&found, err)?;
                }
                writeln!(
                    err,
                    "enqueue: stopped at a line that cannot be inserted: {}; {}",
                    problems.counted(),
                    so_far(done)
                )?;
                return Ok(EXIT_FAILED);
            }
            let Some((&first, &last)) = batch.numbers.first().zip(batch.numbers.last()) else { return Ok(EXIT_OK) };
            let mut answers = Vec::new();
            if let Err(failure) = self.write_batch(batch, &mut answers).await {
                let unknown = format!("whether lines {first} to {last} were inserted is not known");
                let code = report(&failure, &format!("lines {first} to {last} were not inserted"), &unknown, err)?;
                writeln!(err, "enqueue: {}", so_far(done))?;
                return Ok(code);
            }
            done = last;
            // A reader that went away stops the answers, and not the rows.
            match out.as_mut().map(|out| progress.suspend(|| print(*out, &answers))) {
                Some(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => out = None,
                Some(Err(error)) => {
                    writeln!(err, "enqueue: the answers cannot be written; {}", so_far(done))?;
                    return Err(error);
                }
                Some(Ok(())) | None => {}
            }
            if ended {
                return Ok(EXIT_OK);
            }
        }
    }

    async fn write_batch(&self, batch: Chunk, answers: &mut Vec<u8>) -> Result<(), Failure> {
        let mut transaction = Transaction::begin(self).await?;
        let mut chunk = Chunk::default();
        for (number, row) in batch.numbers.into_iter().zip(batch.rows) {
            if chunk.is_full() {
                transaction.write(&mut chunk, answers).await?;
            }
            chunk.push(number, row);
        }
        transaction.write(&mut chunk, answers).await?;
        transaction.commit().await
    }
}

fn print(out: &mut impl Write, answers: &[u8]) -> io::Result<()> {
    out.write_all(answers)?;
    out.flush()
}

/// Where an input stands that was written in part.
fn so_far(done: usize) -> String {
    if done == 0 {
        return "nothing was inserted".to_owned();
    }
    format!("every line up to line {done} is in the table: send the rest again, from line {}", done + 1)
}

fn report(failure: &Failure, nothing: &str, unknown: &str, err: &mut impl Write) -> io::Result<u8> {
    match failure {
        Failure::Refused(found) => {
            let mut problems = Problems::default();
            problems.print(found, err)?;
            writeln!(err, "enqueue: {nothing}: {}", problems.counted())?;
            Ok(EXIT_FAILED)
        }
        Failure::Store(error) => {
            writeln!(err, "enqueue: {nothing}: {error}")?;
            Ok(match error.kind() {
                ErrorKind::Mismatch | ErrorKind::Auth => EXIT_CONFIG,
                ErrorKind::Fatal if matches!(error, StoreError::Setting(_)) => EXIT_CONFIG,
                ErrorKind::Fatal | ErrorKind::Transient | ErrorKind::Serialization => EXIT_FAILED,
            })
        }
        Failure::Unknown { error, outbox_id } => {
            writeln!(
                err,
                "enqueue: {unknown}: {error}; all of them were exactly when there is a row with outbox_id {outbox_id}"
            )?;
            Ok(EXIT_FAILED)
        }
    }
}

/// Rows of one statement, with their lines.
#[derive(Default)]
struct Chunk {
    numbers: Vec<usize>,
    rows: Vec<NewRow>,
    octets: usize,
}

impl Chunk {
    fn is_full(&self) -> bool {
        self.rows.len() >= CHUNK_ROWS_MAX || self.octets >= CHUNK_OCTETS_MAX
    }

    fn push(&mut self, number: usize, row: NewRow) {
        self.octets += row.octets();
        self.numbers.push(number);
        self.rows.push(row);
    }
}

/// A transaction while rows are written to it.
struct Transaction<'a> {
    writer: &'a Writer<'a>,
    tx: Tx,
    sources: BTreeSet<String>,
    /// One of the rows that it inserts.
    inserted: Option<Uuid>,
}

impl<'a> Transaction<'a> {
    async fn begin(writer: &'a Writer<'a>) -> Result<Self, Failure> {
        let tx = writer.db.begin(writer.job.bound).await?;
        Ok(Self { writer, tx, sources: BTreeSet::new(), inserted: None })
    }

    /// Writes a chunk and empties it.
    async fn write(&mut self, chunk: &mut Chunk, answers: &mut impl Write) -> Result<(), Failure> {
        let Chunk { numbers, rows, octets: _ } = std::mem::take(chunk);
        if rows.is_empty() {
            return Ok(());
        }
        let (outbox, bound) = (self.writer.outbox, self.writer.job.bound);
        let enqueued = store::enqueue(&mut self.tx, outbox, &rows, bound).await.map_err(|failure| match failure {
            EnqueueFailure::Store(error) => Failure::Store(error),
            EnqueueFailure::Refused(refused) => Failure::Refused(line_problems(&refused, &numbers)),
        })?;
        for (row, enqueued) in rows.into_iter().zip(&enqueued).filter(|(_, enqueued)| enqueued.inserted) {
            self.inserted.get_or_insert(enqueued.outbox_id);
            if self.sources.len() <= SOURCES_WOKEN_MAX {
                self.sources.insert(row.event.source_name);
            }
        }
        answer(answers, &numbers, &enqueued).map_err(|error| {
            Failure::Store(StoreError::Setting(format!("answers cannot be kept in {}: {error}", temporary())))
        })?;
        self.writer.job.progress.inc(numbers.len() as u64);
        Ok(())
    }

    async fn commit(mut self) -> Result<(), Failure> {
        let bound = self.writer.job.bound;
        let all = [""];
        let mut sources: Vec<&str> = self.sources.iter().map(String::as_str).collect();
        if sources.len() > SOURCES_WOKEN_MAX {
            sources = all.to_vec();
        }
        store::wake(&mut self.tx, &sources, bound).await?;
        let Err(error) = self.tx.commit(bound).await else { return Ok(()) };
        // Every row was there before: there was nothing to commit.
        let Some(outbox_id) = self.inserted else { return Ok(()) };
        // The answer may have been lost on its way, so look. Not there yet is no proof: the server may still be at it.
        let table = qualified(self.writer.job.schema, self.writer.job.table);
        let sql = format!("select 1 from {table} where outbox_id = $1");
        match self.writer.db.query_opt(&sql, &[(&outbox_id, Type::UUID)], bound).await {
            Ok(Some(_)) => Ok(()),
            Ok(None) if error.code().is_some() => Err(Failure::Store(error)),
            Ok(None) | Err(_) => Err(Failure::Unknown { error, outbox_id }),
        }
    }
}

/// What a refused batch means for the lines it came from.
fn line_problems(refused: &EnqueueError, numbers: &[usize]) -> Vec<LineProblem> {
    let line = |row: usize| numbers.get(row).copied().unwrap_or_default();
    match refused {
        EnqueueError::Invalid(found) => found
            .iter()
            .map(|problem| LineProblem {
                line: line(problem.row),
                field: Some(problem.field.to_owned()),
                text: problem.text.clone(),
            })
            .collect(),
        EnqueueError::Conflict(found) => found
            .iter()
            .map(|conflict| LineProblem { line: line(conflict.row), field: None, text: conflict.text() })
            .collect(),
        EnqueueError::TooManyRows { .. }
        | EnqueueError::TooLarge { .. }
        | EnqueueError::Contended
        | EnqueueError::Database(_) => {
            vec![LineProblem { line: line(0), field: None, text: format!("and those after it: {refused}") }]
        }
    }
}

/// Copies an input, showing how much came.
fn copy(input: &mut impl BufRead, to: &mut impl Write, progress: &ProgressBar) -> io::Result<()> {
    loop {
        let octets = match input.fill_buf() {
            Ok([]) => return Ok(()),
            Ok(bytes) => {
                to.write_all(bytes)?;
                progress.inc(bytes.split(|byte| *byte == b'\n').count() as u64 - 1);
                bytes.len()
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        input.consume(octets);
    }
}

fn temporary() -> String {
    std::env::temp_dir().display().to_string()
}
