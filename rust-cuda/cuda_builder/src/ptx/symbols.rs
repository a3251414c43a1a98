//! Readable names instead of mangled ones.
//!
//! A mangled Rust name contains the identity of its crate, a hash that depends
//! on where the crate (or the standard library) lies on disk; and the names of
//! anonymous constants are hashes altogether. In a finished module they mean
//! nothing, and would make its bytes depend on the machine.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::scan::is_identifier;

/// Renames mangled functions to their path, `core__panicking__panic_fmt`, and
/// numbers anonymous constants in order of appearance.
pub(super) fn readable(text: &str) -> Result<String, String> {
    let mut names = Names::default();
    let mut before = HashSet::new();
    let mut after = HashSet::new();
    let mut renamed = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let length = rest.find(|c| !is_identifier(c)).unwrap_or(rest.len());
        if length == 0 {
            let next = rest.find(is_identifier).unwrap_or(rest.len());
            renamed.push_str(&rest[..next]);
            rest = &rest[next..];
            continue;
        }
        let (symbol, tail) = rest.split_at(length);
        rest = tail;
        let name = names.rename(symbol);
        renamed.push_str(&name);
        before.insert(symbol);
        after.insert(name);
    }
    if before.len() == after.len() {
        Ok(renamed)
    } else {
        Err("two symbols became one when they were given readable names".to_owned())
    }
}

#[derive(Default)]
struct Names<'a> {
    /// New names by old ones.
    renamed: HashMap<&'a str, String>,
    /// How many symbols share a readable name.
    uses: HashMap<String, usize>,
}

impl<'a> Names<'a> {
    fn rename(&mut self, symbol: &'a str) -> String {
        let (base, suffix) = split_parameter(symbol);
        let readable = demangle(base).or_else(|| anonymous(base));
        let Some(readable) = readable else {
            return symbol.to_owned();
        };
        let name = match self.renamed.entry(base) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let uses = self.uses.entry(readable.clone()).or_default();
                *uses += 1;
                let number = if *uses == 1 {
                    String::new()
                } else {
                    format!("__{uses}")
                };
                new.insert(format!("{readable}{number}"))
            }
        };
        format!("{name}{suffix}")
    }
}

/// `("f", "_param_0")` for `f_param_0`: LLVM names parameters after their function.
fn split_parameter(symbol: &str) -> (&str, &str) {
    match symbol.rfind("_param_") {
        Some(at) if symbol[at + 7..].bytes().all(|b| b.is_ascii_digit()) => symbol.split_at(at),
        _ => (symbol, ""),
    }
}

/// The path of a mangled function, in characters that PTX allows.
fn demangle(symbol: &str) -> Option<String> {
    let path = format!("{:#}", rustc_demangle::try_demangle(symbol).ok()?);
    let mut name = String::with_capacity(path.len());
    for c in path.chars() {
        name.push(if is_identifier(c) { c } else { '_' });
    }
    // `<T as Trait>::f` starts with a bracket; PTX reserves nothing that starts so.
    Some(format!("rust_{name}"))
}

/// The kind of an anonymous constant.
fn anonymous(symbol: &str) -> Option<String> {
    let kind = ["alloc_", "anon_$_", "anon_", "vtable_$_"]
        .into_iter()
        .find(|kind| symbol.starts_with(kind))?;
    let hash = symbol[kind.len()..].split(['_', '$']).next()?;
    let is_hash = hash.len() >= 16 && hash.bytes().all(|b| b.is_ascii_hexdigit());
    is_hash.then(|| format!("rust_{}", kind.trim_end_matches(['_', '$'])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_named_after_their_path() {
        let text = "call _ZN4core9panicking5panic17h0123456789abcdefE, \
            (_RNvNtCsanIojcP8aaR_4core9panicking18panic_bounds_check_param_1); \
            _RNvXCsgpLtFbHMVoR_1kNtB2_1ANtB2_1T2go \
            _ZN4core9panicking5panic17h0123456789abcdefE \
            _ZN4core9panicking5panic17hfedcba9876543210E";
        let want = "call rust_core__panicking__panic, \
            (rust_core__panicking__panic_bounds_check_param_1); \
            rust__k__A_as_k__T___go \
            rust_core__panicking__panic \
            rust_core__panicking__panic__2";
        assert_eq!(readable(text).unwrap(), want);
    }

    #[test]
    fn anonymous_constants_are_numbered() {
        let text = "alloc_0123456789abcdef0123456789abcdef anon_$_00112233445566778899aabbccddeeff_$_3 \
            alloc_fedcba98765432100123456789abcdef";
        assert_eq!(
            readable(text).unwrap(),
            "rust_alloc rust_anon rust_alloc__2"
        );
    }

    #[test]
    fn the_crates_identity_does_not_matter() {
        let text = |id| format!("_RINvCs{id}_1k7genericmEB2__param_0 _RNvCs{id}_1k5TABLE");
        assert_eq!(
            readable(&text("gpLtFbHMVoR")),
            readable(&text("5dtObyGflQM"))
        );
    }

    #[test]
    fn other_names_stay() {
        let text = "gemm_param_0 %rd1 $L__BB0_2 alloc_count anon_dead _ZN3foo 0f3F800000 _R";
        assert_eq!(readable(text).unwrap(), text);
    }

    #[test]
    fn collisions_are_refused() {
        assert!(readable("alloc_0123456789abcdef rust_alloc").is_err());
    }
}
