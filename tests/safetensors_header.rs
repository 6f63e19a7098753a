//! Safetensors headers: the same files are accepted and refused as by the crate
//! that defines the format, with the same spans.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::Path;

use _k3rs::Error;
use _k3rs::format::safetensors::{HEADER_BYTES_MAX, HeaderText};
use proptest::prelude::*;
use safetensors::SafeTensors;

use common::write_raw;

/// Name, type, shape and absolute span.
type Spans = Vec<(String, String, Vec<usize>, u64, u64)>;

fn ours(path: &Path) -> Result<Spans, Error> {
    let header = HeaderText::read(path)?;
    let entries = header.entries()?.into_iter().map(|entry| {
        let end = entry.offset + entry.length;
        (entry.name.into_owned(), entry.dtype.name.to_owned(), entry.shape, entry.offset, end)
    });
    let mut spans: Spans = entries.collect();
    spans.sort();
    Ok(spans)
}

fn theirs(path: &Path) -> Result<Spans, String> {
    let bytes = fs::read(path).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| e.to_string())?;
    let start = 8 + header as u64;
    let tensors = metadata.tensors().into_iter().map(|(name, info)| {
        let (begin, end) = info.data_offsets;
        let dtype = info.dtype.to_string();
        (name, dtype, info.shape.clone(), start + begin as u64, start + end as u64)
    });
    let mut spans: Spans = tensors.collect();
    spans.sort();
    Ok(spans)
}

/// Writes a file, asserts that both readers agree, and returns our error, if any.
fn judge(header: &[u8], data_bytes: u64) -> Option<String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.safetensors");
    write_raw(&path, header, data_bytes);
    judge_file(&path)
}

fn judge_file(path: &Path) -> Option<String> {
    match (ours(path), theirs(path)) {
        (Ok(ours), Ok(theirs)) => {
            assert_eq!(ours, theirs);
            None
        }
        (Err(ours), Err(_)) => {
            assert!(matches!(ours, Error::Checkpoint { .. }), "{ours:?}");
            let text = ours.to_string();
            assert!(text.contains("a.safetensors") && ours.hint().is_some(), "{text}");
            Some(text)
        }
        (ours, theirs) => panic!("ours: {ours:?}, theirs: {theirs:?}"),
    }
}

#[test]
fn sound_headers_are_accepted() {
    let cases: &[(&str, u64)] = &[
        ("{}", 0),
        (" \n{} \t", 0),
        (r#"{"__metadata__":{}}"#, 0),
        (r#"{"__metadata__":null}"#, 0),
        (
            r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
            8,
        ),
        (r#"{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#, 4),
        (r#"{"a":{"dtype":"F64","shape":[0,3],"data_offsets":[0,0]}}"#, 0),
        (
            r#"{"b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},"a":{"data_offsets":[0,4],"shape":[2],"dtype":"BF16"}}"#,
            7,
        ),
        (r#"{"a":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}"#, 3),
        (r#"{"\u0061\n":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}}"#, 1),
        (r#"{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1],"note":[{}]}}"#, 1),
        (r#"{"a":["I8",[1],[0,1]]}"#, 1),
    ];
    for (header, data_bytes) in cases {
        assert_eq!(judge(header.as_bytes(), *data_bytes), None, "{header}");
    }
}

#[test]
fn broken_headers_are_refused_with_the_reason() {
    let cases: &[(&str, u64, &[&str])] = &[
        ("", 0, &["JSON object"]),
        ("[]", 0, &["JSON object"]),
        ("{} {}", 0, &["trailing characters"]),
        ("{\"a\":", 0, &["EOF", "line 1 column 5"]),
        (r#"{"a":{"dtype":"F32","shape":[1]}}"#, 4, &["tensor `a`", "data_offsets"]),
        (r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, 4, &["tensor `a`", "-1"]),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}"#,
            4,
            &["duplicate"],
        ),
        (r#"{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}"#, 4, &["tensor `a`", "`F33`"]),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
            4,
            &["tensor `a`", "8 bytes", "[2]", "0 to 4"],
        ),
        (r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#, 2, &["tensor `a`"]),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, 4, &["tensor `a`", "4 to 0"]),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, 8, &["tensor `a`", "a gap"]),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}"#,
            7,
            &["tensor `b`", "an overlap", "offset 4"],
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[2],"data_offsets":[5,7]}}"#,
            7,
            &["tensor `b`", "a gap"],
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            3,
            &["tensor `a`", "bytes, as its header says"],
        ),
        (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 5, &["as its header says"]),
        ("{}", 1, &["as its header says"]),
        (
            r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#,
            0,
            &["tensor `a`", "64 bits"],
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[2305843009213693952],"data_offsets":[0,0]}}"#,
            0,
            &["tensor `a`", "64 bits"],
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]}}"#,
            0,
            &["tensor `a`"],
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}}"#,
            1,
            &["tensor `a`", "a gap"],
        ),
        (r#"{"__metadata__":{"a":1}}"#, 0, &["a string"]),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, 0, &["duplicate field `__metadata__`"]),
    ];
    for (header, data_bytes, words) in cases {
        let error = judge(header.as_bytes(), *data_bytes).expect(header);
        for word in *words {
            assert!(error.contains(word), "`{word}` is not in: {error}");
        }
    }
    let error = judge(b"{\"a\xff\":{}}", 0).unwrap();
    assert!(error.contains("UTF-8"), "{error}");
}

/// The one rule where we are stricter: the crate lets the second entry win.
#[test]
fn a_name_that_occurs_twice_is_refused() {
    let header = r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},
        "a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.safetensors");
    write_raw(&path, header.as_bytes(), 4);
    theirs(&path).unwrap();
    let error = ours(&path).unwrap_err().to_string();
    assert!(error.contains("tensor `a`") && error.contains("two"), "{error}");
}

#[test]
fn header_lengths_are_checked_before_anything_is_allocated() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.safetensors");
    for (length, words) in [
        (11, &["a header of 11 bytes", "a file of 18 bytes"][..]),
        (HEADER_BYTES_MAX + 1, &["at most 100000000", "100000001"]),
        (u64::MAX, &["at most 100000000", "18446744073709551615"]),
    ] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(b"{}        ");
        fs::write(&path, &bytes).unwrap();
        let error = judge_file(&path).unwrap();
        for word in words {
            assert!(error.contains(word), "`{word}` is not in: {error}");
        }
    }
    for length in 0..8 {
        fs::write(&path, vec![0; length]).unwrap();
        let error = judge_file(&path).unwrap();
        assert!(error.contains(&format!("a file of {length} bytes")), "{error}");
    }
}

#[test]
fn a_header_of_the_largest_length_is_read() {
    let mut header = vec![b' '; HEADER_BYTES_MAX as usize];
    header[..2].copy_from_slice(b"{}");
    assert_eq!(judge(&header, 0), None);
}

#[derive(Debug, Clone)]
struct Entry {
    dtype: &'static str,
    shape: Vec<u64>,
    /// Added to begin and end, to break a sound layout.
    shift: (i64, i64),
}

fn entry() -> impl Strategy<Value = Entry> {
    let dtype = prop::sample::select(vec![
        "F32", "BF16", "U8", "F16", "I64", "F4", "F6_E2M3", "F8_E8M0", "BOOL", "C64", "F3",
    ]);
    let axis = prop_oneof![12 => 0u64..5, 1 => Just(u64::MAX), 1 => Just(1u64 << 33)];
    let shift = prop_oneof![12 => Just((0, 0)), 1 => (-4i64..5, -4i64..5)];
    (dtype, prop::collection::vec(axis, 0..4), shift).prop_map(|(dtype, shape, shift)| Entry {
        dtype,
        shape,
        shift,
    })
}

/// A header that tiles, but for the shifts, in a shuffled order of names.
fn layout(entries: &[Entry]) -> (String, u64) {
    let mut end = 0u64;
    let mut parts = Vec::new();
    for (number, entry) in entries.iter().enumerate() {
        let bits = match entry.dtype {
            "F4" => 4,
            "F6_E2M3" => 6,
            "F32" => 32,
            "BF16" | "F16" => 16,
            "I64" | "C64" => 64,
            _ => 8,
        };
        let begin = end;
        let elements = entry.shape.iter().try_fold(1u64, |p, axis| p.checked_mul(*axis));
        let bytes = elements.and_then(|elements| elements.checked_mul(bits)).unwrap_or(0) / 8;
        end = begin.saturating_add(bytes.min(1 << 20));
        let (begin, end) =
            (begin.saturating_add_signed(entry.shift.0), end.saturating_add_signed(entry.shift.1));
        let name = (number * 7) % 10;
        parts.push(format!(
            r#""t{name}":{{"dtype":"{}","shape":{:?},"data_offsets":[{begin},{end}]}}"#,
            entry.dtype, entry.shape
        ));
    }
    parts.sort();
    (format!("{{{}}}", parts.join(",")), end)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn generated_headers_are_judged_alike(
        entries in prop::collection::vec(entry(), 0..6),
        extra in prop_oneof![6 => Just(0i64), 1 => -3i64..4],
    ) {
        let (header, data_bytes) = layout(&entries);
        judge(header.as_bytes(), data_bytes.saturating_add_signed(extra));
    }

    #[test]
    fn changed_bytes_are_judged_alike(
        entries in prop::collection::vec(entry(), 1..4),
        place in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let (header, data_bytes) = layout(&entries);
        let mut header = header.into_bytes();
        let place = place.index(header.len());
        header[place] = byte;
        judge(&header, data_bytes);
    }
}
