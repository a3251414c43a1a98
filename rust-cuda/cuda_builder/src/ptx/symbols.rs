//! Numbers instead of hashes in symbol names.
//!
//! rustc mangles crate identities into names: `17h<16 hex digits>E` at the end of
//! legacy names, `Cs<base 62>_` inside v0 names, and content hashes in the
//! names of constants. They differ between toolchains in different folders, and
//! mean nothing in a finished module.

use std::collections::{HashMap, HashSet};

use super::scan::is_identifier;

/// Replaces each hash by its number in order of first appearance.
pub(super) fn number_hashes(text: &str) -> Result<String, String> {
    let mut numbers = HashMap::new();
    let mut before = HashSet::new();
    let mut after = HashSet::new();
    let mut numbered = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let length = rest.find(|c| !is_identifier(c)).unwrap_or(rest.len());
        if length == 0 {
            let next = rest.find(is_identifier).unwrap_or(rest.len());
            numbered.push_str(&rest[..next]);
            rest = &rest[next..];
            continue;
        }
        let (symbol, tail) = rest.split_at(length);
        rest = tail;
        let renamed = rename(symbol, &mut numbers);
        before.insert(symbol);
        numbered.push_str(&renamed);
        after.insert(renamed);
    }
    if before.len() == after.len() {
        Ok(numbered)
    } else {
        Err("two symbols became one when their hashes were numbered".to_owned())
    }
}

fn rename<'a>(symbol: &'a str, numbers: &mut HashMap<&'a str, usize>) -> String {
    let mut number = |hash: &'a str| {
        let next = numbers.len();
        *numbers.entry(hash).or_insert(next)
    };
    let is_hex = |s: &str| {
        s.bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    if symbol.starts_with("_ZN")
        && let Some((path, hash)) = symbol.strip_suffix('E').and_then(|s| s.rsplit_once("17h"))
        && hash.len() == 16
        && is_hex(hash)
    {
        return format!("{path}17h{:016x}E", number(hash));
    }
    if symbol.starts_with("_R") {
        let mut renamed = String::with_capacity(symbol.len());
        let mut rest = symbol;
        while let Some(at) = rest.find("Cs") {
            let (head, tail) = rest.split_at(at + 2);
            renamed.push_str(head);
            let length = tail.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(0);
            // A short "Cs.._" is part of some identifier, and stable as it is.
            if length >= 8 && tail[length..].starts_with('_') {
                renamed.push_str(&number(&tail[..length]).to_string());
                rest = &tail[length..];
            } else {
                rest = tail;
            }
        }
        renamed.push_str(rest);
        return renamed;
    }
    for prefix in ["alloc_", "anon_$_", "anon_"] {
        if let Some(hash) = symbol.strip_prefix(prefix) {
            let (hash, suffix) = hash.split_at(
                hash.find(|c| !is_identifier(c) || c == '_')
                    .unwrap_or(hash.len()),
            );
            if hash.len() >= 16 && is_hex(hash) {
                return format!("{prefix}{}{suffix}", number(hash));
            }
        }
    }
    symbol.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_all_kinds_are_numbered_in_order() {
        let text = "call _ZN4core9panicking5panic17h0123456789abcdefE, \
            (_RNvMs_NtCs8zMdGyjPOWH_4core3fmtCsfmW8kMoe5xw_5asymk); \
            alloc_0123456789abcdef0123456789abcdef, anon_$_00112233445566778899aabbccddeeff_$_3 \
            _ZN4core9panicking5panic17h0123456789abcdefE";
        let want = "call _ZN4core9panicking5panic17h0000000000000000E, \
            (_RNvMs_NtCs1_4core3fmtCs2_5asymk); \
            alloc_3, anon_$_4_$_3 \
            _ZN4core9panicking5panic17h0000000000000000E";
        assert_eq!(number_hashes(text).unwrap(), want);
    }

    #[test]
    fn other_names_stay() {
        let text = "gemm_param_0 %rd1 $L__BB0_2 alloc_count anon_dead _ZN3foo3barE 0f3F800000";
        assert_eq!(number_hashes(text).unwrap(), text);
    }

    #[test]
    fn collisions_are_refused() {
        let text = "alloc_0123456789abcdef alloc_0";
        assert!(number_hashes(text).is_err());
    }
}
