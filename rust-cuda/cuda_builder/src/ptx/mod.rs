//! What happens to the compiler's PTX before it is a module.
//!
//! rustc cannot say everything that a kernel needs, and names some symbols after
//! hashes. [`finish`] therefore edits the text, four edits in all:
//!
//! 1. **Launch bounds.** `#[kernel(threads = 384, ..)]` leaves a comment
//!    `// cuda_std launch_bounds NAME maxntid=384 ..` in the module header. The
//!    comment goes, and `.maxntid 384, 1, 1` and so on appear between the
//!    parameter list of `.visible .entry NAME` and its body.
//! 2. **Tensor maps.** A 128-byte parameter of alignment 8 (`cuda_std::TensorMap`)
//!    gets the alignment of 64 that TMA needs.
//! 3. **Symbols** that are mangled, and so contain hashes, get readable names.
//! 4. **White space** at line ends and runs of blank lines go.
//!
//! and refuses a module that calls a function it does not define, declares bounds
//! for a kernel it does not have, or shows a path of the machine that built it.
//! The [`Report`] lists what is in each entry.

mod report;
mod scan;
mod symbols;

use std::collections::BTreeMap;
use std::path::PathBuf;

pub use report::{Entry, Report};
use scan::{Item, items};

/// How `cuda_std` marks its comments.
const BOUNDS_COMMENT: &str = "// cuda_std launch_bounds ";

/// Edits and checks one module; returns it with its report.
///
/// # Errors
///
/// What does not have the expected form, in words.
pub fn finish(assembly: &str) -> Result<(String, Report), String> {
    let (text, bounds) = take_launch_bounds(assembly)?;
    let text = edit_entries(&text, bounds)?;
    let text = symbols::readable(&text)?;
    let text = tidy(&text);
    let report = report::report(&text)?;
    Ok((text, report))
}

/// Refuses a module that shows one of the folders in `private`.
///
/// # Errors
///
/// The line that shows it.
pub fn check_no_paths<'a>(
    ptx: &str,
    private: impl IntoIterator<Item = &'a PathBuf>,
) -> Result<(), String> {
    for folder in private {
        // "/" and the like would match everything and prove nothing.
        let Some(folder) = folder.to_str().filter(|f| f.len() > 3) else {
            continue;
        };
        if let Some(line) = ptx.lines().find(|line| line.contains(folder)) {
            return Err(format!("it contains the path {folder}: {}", line.trim()));
        }
    }
    Ok(())
}

/// The directives of one entry, in the order they are written.
type Bounds = Vec<String>;

/// Removes the bounds comments and returns them by kernel.
fn take_launch_bounds(assembly: &str) -> Result<(String, BTreeMap<String, Bounds>), String> {
    let mut bounds = BTreeMap::new();
    let mut text = String::with_capacity(assembly.len());
    for line in assembly.lines() {
        let Some(comment) = line.trim_start().strip_prefix(BOUNDS_COMMENT) else {
            text.push_str(line);
            text.push('\n');
            continue;
        };
        let mut words = comment.split_whitespace();
        let kernel = words
            .next()
            .ok_or_else(|| format!("no kernel in `{line}`"))?;
        let directives: Option<Bounds> = words.map(directive).collect();
        let directives = directives.ok_or_else(|| format!("cannot read `{line}`"))?;
        if bounds.insert(kernel.to_owned(), directives).is_some() {
            return Err(format!("two launch bounds for {kernel}"));
        }
    }
    Ok((text, bounds))
}

/// `maxntid=384` as a PTX directive.
fn directive(word: &str) -> Option<String> {
    let (name, value) = word.split_once('=')?;
    let value: u32 = value.parse().ok()?;
    match name {
        "maxntid" | "reqnctapercluster" => Some(format!(".{name} {value}, 1, 1")),
        "minnctapersm" => Some(format!(".{name} {value}")),
        _ => None,
    }
}

/// Inserts the launch bounds and raises the alignment of tensor maps.
fn edit_entries(text: &str, mut bounds: BTreeMap<String, Bounds>) -> Result<String, String> {
    let mut edited = String::with_capacity(text.len() + 4096);
    let mut copied = 0;
    for item in items(text)? {
        let Item::Entry {
            name,
            parameters,
            body,
        } = item
        else {
            continue;
        };
        edited.push_str(&text[copied..parameters.start]);
        for line in text[parameters.clone()].split_inclusive('\n') {
            let is_tensor_map =
                line.trim_start().starts_with(".param .align 8 .b8 ") && line.contains("[128]");
            if is_tensor_map {
                edited.push_str(&line.replacen(".align 8", ".align 64", 1));
            } else {
                edited.push_str(line);
            }
        }
        edited.push_str(text[parameters.end..body.start].trim_end());
        edited.push('\n');
        for directive in bounds.remove(name).unwrap_or_default() {
            edited.push_str(&directive);
            edited.push('\n');
        }
        copied = body.start;
    }
    edited.push_str(&text[copied..]);
    match bounds.keys().next() {
        Some(kernel) => Err(format!("launch bounds for {kernel}, which has no entry")),
        None => Ok(edited),
    }
}

/// No white space at line ends, no two blank lines in a row, one newline at the end.
fn tidy(text: &str) -> String {
    let mut tidied = String::with_capacity(text.len());
    let mut blank = true;
    for line in text.lines().map(str::trim_end) {
        if line.is_empty() && blank {
            continue;
        }
        blank = line.is_empty();
        tidied.push_str(line);
        tidied.push('\n');
    }
    tidied.truncate(tidied.trim_end().len());
    tidied.push('\n');
    tidied
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = "\
//
// Generated by LLVM NVPTX Back-End
//

.version 8.0
.target sm_90a
.address_size 64


// cuda_std launch_bounds gemm maxntid=384 minnctapersm=1 reqnctapercluster=2
.extern .shared .align 1024 .b8 dyn_smem[];

.visible .entry gemm(
\t.param .u64 .ptr .align 1 gemm_param_0,
\t.param .align 8 .b8 gemm_param_1[128],
\t.param .align 8 .b8 gemm_param_2[64]
)
{
\t// begin inline asm
\t{
\t.reg .pred p;
}
\t// end inline asm \t
\t@%p1 bar.sync 1, 128;
\tbar.sync \t0;
\tret;
}
.visible .entry plain(

)
{
\tret;
}
";

    #[test]
    fn bounds_move_between_parameters_and_body() {
        let (ptx, report) = finish(MODULE).unwrap();
        assert!(
            ptx.contains(")\n.maxntid 384, 1, 1\n.minnctapersm 1\n.reqnctapercluster 2, 1, 1\n{"),
            "{ptx}"
        );
        assert!(!ptx.contains("launch_bounds"));
        assert_eq!(ptx.matches(".maxntid").count(), 1, "plain has no bounds");
        assert_eq!(report.entries.len(), 2);
        assert_eq!(report.entries[0].collectives["bar.sync"], 2);
    }

    #[test]
    fn only_128_byte_parameters_are_tensor_maps() {
        let (ptx, _) = finish(MODULE).unwrap();
        assert!(ptx.contains(".align 64 .b8 gemm_param_1[128]"));
        assert!(ptx.contains(".align 8 .b8 gemm_param_2[64]"));
        assert!(ptx.contains(".align 1024 .b8 dyn_smem[]"));
    }

    #[test]
    fn finishing_twice_changes_nothing() {
        let (once, _) = finish(MODULE).unwrap();
        assert_eq!(finish(&once).unwrap().0, once);
    }

    #[test]
    fn bounds_without_their_kernel_are_refused() {
        let text = MODULE.replace("launch_bounds gemm ", "launch_bounds gone ");
        assert!(finish(&text).unwrap_err().contains("gone"));
        let text = MODULE.replace("maxntid=384", "maxntid=many");
        assert!(finish(&text).unwrap_err().contains("cannot read"));
        let line = "// cuda_std launch_bounds gemm maxntid=1\n";
        assert!(
            finish(&format!("{line}{MODULE}"))
                .unwrap_err()
                .contains("two launch bounds")
        );
    }

    #[test]
    fn paths_are_refused() {
        let folder = PathBuf::from("/home/someone/checkout");
        assert!(check_no_paths("// /home/someone/checkout/src", [&folder]).is_err());
        assert!(check_no_paths("// src", [&folder]).is_ok());
    }
}
