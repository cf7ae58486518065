//! `keiro-relay bench` runs and prints its figures; those that are no times are held to what the design promises.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::process::Stdio;
use std::time::Duration;

use keiro_relay::cli::demo::services::{self, RunAs};
use serde_json::Value;

/// It starts a server and fills six tables.
const BENCH_MAX: Duration = Duration::from_secs(300);
/// Buffers per claimed row that the design promises (31 to 46), with room for another version of PostgreSQL.
const CLAIM_BUFFERS_MAX: f64 = 60.0;

#[test]
fn claims_stay_flat_behind_a_failing_key_and_behind_dead_rows() {
    let directory = services::fresh_directory("bench-test").expect("a directory");
    let output = |name| File::create(directory.join(name)).expect("open an output file");
    let program = OsStr::new(env!("CARGO_BIN_EXE_keiro-relay"));
    let mut command = services::tethered(program, RunAs::Ourselves).expect("a command");
    command.args(["bench", "--quick", "--only", "buffers", "--json"]);
    command.stdin(Stdio::null()).stdout(output("stdout")).stderr(output("stderr"));
    let mut bench = services::spawn(command).expect("start the bench");
    let status = services::wait_bounded(&mut bench, BENCH_MAX);
    let read = |name| fs::read_to_string(directory.join(name)).expect("its output");
    if status.is_none() {
        let _ = bench.kill();
        let _ = bench.wait();
    }
    assert_eq!(status.and_then(|status| status.code()), Some(0), "{}\n{}", read("stdout"), read("stderr"));

    let printed: Value = serde_json::from_str(&read("stdout")).expect("one object");
    let figures = printed["scenarios"][0]["figures"].as_array().expect("figures");
    assert_eq!(figures.len(), 6, "two profiles, three tables: {printed}");
    for three in figures.chunks(3) {
        let per_row: Vec<f64> =
            three.iter().map(|line| line["buffers / claimed row"].as_f64().expect("a number")).collect();
        for (line, buffers) in three.iter().zip(&per_row) {
            assert!(*buffers > 0.0 && *buffers < CLAIM_BUFFERS_MAX, "{line}");
            assert!(*buffers < 2.0 * per_row[0], "{line} beside {} when nothing is in front", per_row[0]);
        }
        let probe = three[1]["probe"].as_f64().expect("a probe of the failing key");
        assert!(probe < 100.0, "a key that fails costs {probe} buffers to look at");
    }
    let _ = fs::remove_dir_all(&directory);
}
