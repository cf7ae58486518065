//! The import table of ARCHITECTURE.md holds: every `crate::…`, `super::…` and `keiro_relay::…` path in `src` is allowed by it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

type Table = BTreeMap<String, BTreeSet<String>>;

/// The table under "Who may import whom": `everything` stands for all modules of the table but `main`.
fn import_table() -> Table {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md is there");
    let section = text.split("## Who may import whom").nth(1).expect("the section is there");
    let rows: Vec<(String, String)> = section
        .lines()
        .skip_while(|line| !line.starts_with("|---"))
        .skip(1)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
            assert_eq!(cells.len(), 2, "a row has two cells: {line}");
            (cells[0].trim_matches('`').to_owned(), cells[1].to_owned())
        })
        .collect();
    let modules: BTreeSet<String> =
        rows.iter().map(|(module, _)| module.clone()).filter(|name| name != "main").collect();
    assert!(modules.len() > 5, "the table was not read: {modules:?}");
    rows.iter()
        .map(|(module, allowed)| {
            let allowed = match allowed.as_str() {
                "nothing" => BTreeSet::new(),
                "everything" => modules.clone(),
                names => names.split(',').map(|name| name.trim().trim_matches('`').to_owned()).collect(),
            };
            for name in &allowed {
                assert!(modules.contains(name), "{module} may import {name}, which has no row");
            }
            (module.clone(), allowed)
        })
        .collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file below `src` with its module path: `src/store/claim.rs` is `["store", "claim"]`.
fn sources() -> Vec<(PathBuf, Vec<String>)> {
    fn walk(directory: &Path, path: &[String], found: &mut Vec<(PathBuf, Vec<String>)>) {
        for entry in std::fs::read_dir(directory).expect("src can be read") {
            let file = entry.expect("src can be read").path();
            let stem = file.file_stem().and_then(|stem| stem.to_str()).expect("names are UTF-8").to_owned();
            let inner = [path, std::slice::from_ref(&stem)].concat();
            if file.is_dir() {
                walk(&file, &inner, found);
            } else if file.extension().is_some_and(|extension| extension == "rs") {
                let module = if stem == "mod" { path.to_vec() } else { inner };
                found.push((file, module));
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join("src"), &[], &mut found);
    found
}

/// The text without comments and without what string and character literals hold.
fn code_only(text: &str) -> String {
    let bytes: Vec<char> = text.chars().collect();
    let mut code = String::new();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let starts = |word: &str| rest.iter().copied().take(word.chars().count()).eq(word.chars());
        if starts("//") {
            at += rest.iter().position(|c| *c == '\n').unwrap_or(rest.len());
        } else if starts("/*") {
            let mut depth = 0;
            while at < bytes.len() {
                let pair: String = bytes[at..].iter().take(2).collect();
                at += match pair.as_str() {
                    "/*" => {
                        depth += 1;
                        2
                    }
                    "*/" => {
                        depth -= 1;
                        2
                    }
                    _ => 1,
                };
                if depth == 0 {
                    break;
                }
            }
        } else if starts("r\"") || starts("r#") && rest.iter().skip(1).find(|c| **c != '#') == Some(&'"') {
            let hashes = rest.iter().skip(1).take_while(|c| **c == '#').count();
            let end: String = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
            let body: String = rest[hashes + 2..].iter().collect();
            let len = body.find(&end).map_or(body.chars().count(), |byte| body[..byte].chars().count() + end.len());
            at += hashes + 2 + len;
        } else if starts("\"") {
            at += 1;
            while at < bytes.len() && bytes[at] != '"' {
                at += if bytes[at] == '\\' { 2 } else { 1 };
            }
            at += 1;
        } else if starts("'\\") {
            // An escaped character: up to its closing quote.
            at += 3 + rest[3..].iter().position(|c| *c == '\'').unwrap_or(0);
        } else if rest.first() == Some(&'\'') && rest.get(2) == Some(&'\'') {
            at += 3;
        } else {
            code.push(rest[0]);
            at += 1;
        }
    }
    code
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The top-level modules that a file of the given module path names.
fn imports(code: &str, module: &[String]) -> BTreeSet<String> {
    let code: String = code.split_whitespace().collect::<Vec<_>>().join(" ").replace(" :: ", "::");
    let mut found = BTreeSet::new();
    for root_word in ["crate", "keiro_relay", "super"] {
        for (at, _) in code.match_indices(&format!("{root_word}::")) {
            let before = code[..at].chars().next_back();
            // `$crate::`, `pub(in super::…)` and `super::super::` begin at the first word.
            if before.is_some_and(|c| is_word(c) || c == ':') {
                continue;
            }
            let mut rest = &code[at + root_word.len() + 2..];
            if root_word == "super" {
                let mut depth = module.len().saturating_sub(1);
                while let Some(tail) = rest.strip_prefix("super::") {
                    rest = tail;
                    depth = depth.saturating_sub(1);
                }
                // Not at the crate's root: still inside the module itself.
                if depth > 0 {
                    continue;
                }
            }
            found.extend(first_names(rest.trim_start()));
        }
    }
    found
}

/// `domain::policy::Policy` → domain; `{domain::policy, config::{Config, Relay}}` → domain, config.
fn first_names(path: &str) -> Vec<String> {
    let name = |text: &str| text.trim_start().chars().take_while(|c| is_word(*c)).collect::<String>();
    let Some(group) = path.strip_prefix('{') else { return vec![name(path)] };
    let mut names = Vec::new();
    let mut depth = 0;
    let mut start = 0;
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' | ',' if depth == 0 => {
                names.push(name(&group[start..at]));
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

#[test]
fn every_import_is_allowed_by_the_table() {
    let table = import_table();
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for (file, module) in sources() {
        let Some(top) = module.first().filter(|top| *top != "lib") else { continue };
        seen.insert(top.clone());
        let Some(allowed) = table.get(top) else {
            wrong.push(format!("{top} has no row in ARCHITECTURE.md"));
            continue;
        };
        let text = std::fs::read_to_string(&file).expect("a source file can be read");
        for name in imports(&code_only(&text), &module) {
            // Names that are no module (macros, the crate's own re-exports) are none of the table's business.
            if table.contains_key(&name) && name != *top && !allowed.contains(&name) {
                let file = file.strip_prefix(root()).expect("below the root").display();
                wrong.push(format!("{file}: {top} may not import {name}"));
            }
        }
    }
    let rows: BTreeSet<String> = table.keys().cloned().collect();
    wrong.extend(
        rows.difference(&seen).map(|module| format!("{module} has a row in ARCHITECTURE.md and no source file")),
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_table_has_no_cycle() {
    let table = import_table();
    // Whoever only imports what is finished is finished; what remains waits for itself.
    let mut finished = BTreeSet::new();
    loop {
        let ready: Vec<_> = table
            .iter()
            .filter(|(module, allowed)| {
                !finished.contains(*module) && allowed.iter().all(|name| name == *module || finished.contains(name))
            })
            .map(|(module, _)| module.clone())
            .collect();
        if ready.is_empty() {
            break;
        }
        finished.extend(ready);
    }
    let stuck: Vec<_> = table.keys().filter(|module| !finished.contains(*module)).collect();
    assert!(stuck.is_empty(), "these import each other in a circle: {stuck:?}");
}

#[test]
fn the_reader_of_imports_sees_what_the_compiler_sees() {
    let found = |code: &str, module: &[&str]| {
        let module: Vec<_> = module.iter().map(|name| (*name).to_owned()).collect();
        imports(&code_only(code), &module).into_iter().collect::<Vec<_>>()
    };
    assert_eq!(found("use crate::store::claim;", &["domain"]), ["store"]);
    assert_eq!(
        found("pub(crate) use crate::{\n    domain::{plan, lanes},\n    config::Config,\n};", &["x"]),
        ["config", "domain"]
    );
    assert_eq!(found("fn f() { let _ = crate::relay::run(); }", &["x"]), ["relay"]);
    assert_eq!(found("impl From<crate::http::Error> for E {}", &["x"]), ["http"]);
    assert_eq!(found("use super::plan; use super::super::store;", &["domain", "lanes"]), ["store"]);
    assert_eq!(found("use super::store;", &["domain"]), ["store"]);
    assert_eq!(found("use super::super::{publish, store::x};", &["relay", "pass"]), ["publish", "store"]);
    assert_eq!(
        found("// crate::store\n/* crate::http /* */ crate::cli */ let s = \"crate::relay\\\"\";", &["x"]),
        [""; 0]
    );
    assert_eq!(found("let s = r#\"crate::relay \" \"#; use crate::config;", &["x"]), ["config"]);
    assert_eq!(found("let c = '\"'; use crate::config; let d = '\\''; use crate::store;", &["x"]), ["config", "store"]);
    assert_eq!(found("fn f<'a>(x: &'a str) { crate::store::g(x) }", &["x"]), ["store"]);
    assert_eq!(found("fn main() { keiro_relay::cli::main() }", &["main"]), ["cli"]);
}
