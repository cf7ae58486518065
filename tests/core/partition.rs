//! Keys land where Java producers put them: a table that Kafka's own Java client printed.

use keiro_relay::domain::partition::{murmur2, of_key};

const TABLE: &str = include_str!("murmur2.txt");
/// The numbers of partitions in the table's columns.
const COUNTS: [i32; 7] = [1, 2, 3, 6, 12, 50, 1000];

fn octets(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).expect("hex"));
    digits.map(|pair| u8::from_str_radix(pair, 16).expect("hex")).collect()
}

#[test]
fn partition_is_the_java_clients() {
    let mut lines = 0;
    for line in TABLE.lines().filter(|line| !line.starts_with('#')) {
        let mut columns = line.split(' ');
        let key = octets(columns.next().expect("a key").trim_matches('"'));
        let mut number = || columns.next().expect("a number").parse::<i32>().expect("a number");
        assert_eq!(murmur2(&key), number(), "{line}");
        let key = String::from_utf8(key).expect("a key in UTF-8");
        for count in COUNTS {
            assert_eq!(of_key(&key, count), number(), "{count} partitions: {line}");
        }
        lines += 1;
    }
    assert!(lines > 250, "{lines} lines");
}
