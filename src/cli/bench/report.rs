//! Figures as a markdown table or as JSON.
//!
//! Nothing here ever computes a figure.

use serde_json::{Map, Value, json};

/// One cell of a table.
#[derive(Debug, Clone)]
pub(super) enum Cell {
    Text(String),
    /// A number and how many of its decimals mean anything.
    Number(f64, usize),
    /// Not applicable.
    Nothing,
}

impl Cell {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// A whole number.
    pub(super) fn count(count: u64) -> Self {
        Self::Number(count as f64, 0)
    }

    /// A quotient, when there is something to divide by.
    pub(super) fn ratio(of: f64, by: f64, decimals: usize) -> Self {
        if by > 0.0 { Self::Number(of / by, decimals) } else { Self::Nothing }
    }

    fn markdown(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Number(number, 0) => grouped(*number),
            Self::Number(number, decimals) => format!("{number:.decimals$}"),
            Self::Nothing => "–".to_owned(),
        }
    }

    fn json(&self) -> Value {
        match self {
            Self::Text(text) => json!(text),
            Self::Number(number, decimals) => {
                let factor = 10_f64.powi(i32::try_from(*decimals).unwrap_or(0));
                json!((number * factor).round() / factor)
            }
            Self::Nothing => Value::Null,
        }
    }
}

fn grouped(number: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts and rates, rounded for people")]
    let whole = number.max(0.0).round() as usize;
    crate::cli::demo::grouped(whole)
}

/// What one scenario measured.
#[derive(Debug)]
pub(super) struct Section {
    pub title: String,
    /// What was measured and how, before the table.
    pub notes: Vec<String>,
    pub heads: Vec<&'static str>,
    pub rows: Vec<Vec<Cell>>,
}

impl Section {
    pub(super) fn markdown(&self) -> String {
        let mut text = format!("## {}\n\n", self.title);
        for note in &self.notes {
            text.push_str(note);
            text.push_str("\n\n");
        }
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let is_number = |column: usize| !self.rows.iter().any(|row| matches!(row[column], Cell::Text(_)));
        text += &line(self.heads.iter().map(|head| (*head).to_owned()).collect());
        let rule = |column| if is_number(column) { "---:".to_owned() } else { "---".to_owned() };
        text += &line((0..self.heads.len()).map(rule).collect());
        for row in &self.rows {
            text += &line(row.iter().map(Cell::markdown).collect());
        }
        text
    }

    pub(super) fn json(&self, name: &str) -> Value {
        let figures: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                let cells = self.heads.iter().zip(row).map(|(head, cell)| ((*head).to_owned(), cell.json()));
                Value::Object(cells.collect::<Map<_, _>>())
            })
            .collect();
        json!({ "name": name, "title": self.title, "notes": self.notes, "figures": figures })
    }
}
