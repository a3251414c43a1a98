//! What is in each entry of a module.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::scan::{Item, code, items};

/// Instructions that all threads of a warp, block or cluster must execute
/// together. Their number in the PTX is a fact of the source: if it changes
/// without the source, a compiler pass has copied one into a divergent branch.
const COLLECTIVES: [&str; 10] = [
    "bar.sync",
    "barrier.sync",
    "barrier.cluster",
    "bar.warp.sync",
    "shfl.sync",
    "vote.sync",
    "ldmatrix.sync",
    "stmatrix.sync",
    "mma.sync",
    "wgmma.mma_async",
];

/// One kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its symbol.
    pub name: String,
    /// Collective instructions by name; those that do not occur are left out.
    pub collectives: BTreeMap<String, u32>,
    /// Bytes of local memory that the compiler set aside (not register spills,
    /// which ptxas decides).
    pub local_bytes: u32,
    /// Calls of functions that were not inlined.
    pub calls: u32,
}

/// One module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// PTX version, `8.0`.
    pub version: String,
    /// GPU target, `sm_90a`.
    pub target: String,
    /// Kernels in the module's order.
    pub entries: Vec<Entry>,
    /// Functions that were not inlined into their callers.
    pub functions: Vec<String>,
}

pub(super) fn report(ptx: &str) -> Result<Report, String> {
    let header = |directive: &str| {
        ptx.lines()
            .find_map(|line| line.strip_prefix(directive))
            .map(|value| value.trim().to_owned())
            .ok_or_else(|| format!("no {directive} line"))
    };
    let mut report = Report {
        version: header(".version ")?,
        target: header(".target ")?,
        entries: Vec::new(),
        functions: Vec::new(),
    };
    for item in items(ptx)? {
        match item {
            Item::Entry { name, body, .. } => report.entries.push(entry(name, &ptx[body])),
            Item::Function { name } => report.functions.push(name.to_owned()),
            Item::Undefined { name } => {
                return Err(format!("it calls {name}, which nothing defines"));
            }
        }
    }
    if report.entries.is_empty() {
        return Err("it has no kernel; is the feature right?".to_owned());
    }
    Ok(report)
}

fn entry(name: &str, body: &str) -> Entry {
    let mut entry = Entry {
        name: name.to_owned(),
        collectives: BTreeMap::new(),
        local_bytes: 0,
        calls: 0,
    };
    for statement in body
        .lines()
        .map(code)
        .flat_map(|line| line.split([';', '{', '}']))
    {
        let mut words = statement
            .split_whitespace()
            .skip_while(|word| word.starts_with('@'));
        let Some(mnemonic) = words.next() else {
            continue;
        };
        if let Some(found) = COLLECTIVES.iter().find(|&&c| is_instruction(mnemonic, c)) {
            *entry.collectives.entry((*found).to_owned()).or_default() += 1;
        } else if is_instruction(mnemonic, "call") {
            entry.calls += 1;
        } else if mnemonic == ".local" {
            entry.local_bytes += array_bytes(statement);
        }
    }
    entry
}

/// Whether `mnemonic` is `instruction` or one of its variants.
fn is_instruction(mnemonic: &str, instruction: &str) -> bool {
    mnemonic
        .strip_prefix(instruction)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// 64 for `.local .align 8 .b8 __local_depot0[64]`.
fn array_bytes(declaration: &str) -> u32 {
    declaration
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .and_then(|(bytes, _)| bytes.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = ".version 8.0\n.target sm_90a\n";

    #[test]
    fn entries_are_counted_one_by_one() {
        let text = format!(
            "{HEADER}.visible .entry a()\n{{\n\
             \t.local .align 8 .b8 \t__local_depot0[64];\n\
             \t{{ .reg .pred p; setp.ne.b32 p, %r1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r1, %r2}}, %rd1; }}\n\
             \t@%p1 bar.sync 1, 128; // bar.sync in a comment\n\
             \tbar.synchronise;\n\tcall.uni helper, (x);\n\tret;\n}}\n\
             .func helper()\n{{\n\tbar.sync 0;\n}}\n\
             .visible .entry b()\n{{\n\tshfl.sync.idx.b32 \t%r1, %r2, 0, 31, -1;\n\tret;\n}}\n"
        );
        let report = report(&text).unwrap();
        assert_eq!(
            (report.version.as_str(), report.target.as_str()),
            ("8.0", "sm_90a")
        );
        assert_eq!(report.functions, ["helper"]);
        let counts = |i: usize| {
            let list: Vec<_> = report.entries[i]
                .collectives
                .iter()
                .map(|(k, v)| (k.as_str(), *v))
                .collect();
            list
        };
        assert_eq!(counts(0), [("bar.sync", 1), ("wgmma.mma_async", 1)]);
        assert_eq!(counts(1), [("shfl.sync", 1)]);
        assert_eq!(
            (report.entries[0].local_bytes, report.entries[0].calls),
            (64, 1)
        );
        assert_eq!(
            (report.entries[1].local_bytes, report.entries[1].calls),
            (0, 0)
        );
    }

    #[test]
    fn incomplete_modules_are_refused() {
        let entry = ".visible .entry a()\n{\n\tret;\n}\n";
        let undefined = format!("{HEADER}.extern .func memcpy\n(\n)\n;\n{entry}");
        assert!(report(&undefined).unwrap_err().contains("memcpy"));
        assert!(report(HEADER).unwrap_err().contains("no kernel"));
        assert!(report(entry).unwrap_err().contains(".version"));
    }
}
