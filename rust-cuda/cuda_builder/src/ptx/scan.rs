//! Just enough of PTX's grammar: functions, their parameters and their bodies.

use std::ops::Range;

/// A function of the module; ranges are byte offsets into the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item<'a> {
    /// `.visible .entry NAME(parameters) { body }`
    Entry {
        /// The kernel's name.
        name: &'a str,
        /// Between the parentheses.
        parameters: Range<usize>,
        /// From the opening brace to the closing one, both included.
        body: Range<usize>,
    },
    /// `.func NAME(..) { .. }`
    Function {
        /// Its name.
        name: &'a str,
    },
    /// `.extern .func NAME(..);`, defined nowhere in a whole program.
    Undefined {
        /// Its name.
        name: &'a str,
    },
}

/// Lists the module's functions in order.
///
/// A body ends where its braces balance: a `}` alone on a line may just as well
/// end a block of inline assembly.
pub(super) fn items(text: &str) -> Result<Vec<Item<'_>>, String> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let line_end = text[at..].find('\n').map_or(text.len(), |n| at + n + 1);
        let line = code(&text[at..line_end]);
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_entry = words.contains(&".entry") || line.contains(".entry ");
        if !is_entry && !words.contains(&".func") {
            at = line_end;
            continue;
        }
        let keyword = if is_entry { ".entry" } else { ".func" };
        let head = at + line.find(keyword).map_or(0, |n| n + keyword.len());
        let end = text[head..]
            .find(['{', ';'])
            .map(|n| head + n)
            .ok_or_else(|| format!("`{}` has no end", line.trim()))?;
        let (name, parameters) = signature(text, head, end)
            .ok_or_else(|| format!("cannot read the function `{}`", line.trim()))?;
        if text[end..].starts_with(';') {
            // A declaration: of a function that follows, or of one that does not exist.
            if words.contains(&".extern") {
                found.push(Item::Undefined { name });
            }
            at = end + 1;
            continue;
        }
        let body = end..closing_brace(text, end).ok_or_else(|| format!("{name} has no end"))?;
        at = body.end;
        found.push(if is_entry {
            Item::Entry {
                name,
                parameters,
                body,
            }
        } else {
            Item::Function { name }
        });
    }
    Ok(found)
}

/// Name and parameter range of the function whose text after `.entry` or `.func`
/// is `head..end`. A return value, `(.param .b32 r) name(..)`, comes first.
fn signature(text: &str, head: usize, end: usize) -> Option<(&str, Range<usize>)> {
    let mut start = head + text[head..end].find(|c: char| !c.is_whitespace())?;
    if text[start..end].starts_with('(') {
        let close = start + text[start..end].find(')')? + 1;
        start = close + text[close..end].find(|c: char| !c.is_whitespace())?;
    }
    let length = text[start..end]
        .find(|c: char| !is_identifier(c))
        .unwrap_or(end - start);
    let name = &text[start..start + length];
    let rest = start + length;
    let parameters = match text[rest..end].find('(') {
        Some(open) => rest + open + 1..rest + text[rest..end].rfind(')')?,
        None => rest..rest,
    };
    (!name.is_empty()).then_some((name, parameters))
}

/// Offset after the brace that closes the one at `open`.
fn closing_brace(text: &str, open: usize) -> Option<usize> {
    let mut depth = 0_usize;
    let mut at = open;
    for line in text[open..].split_inclusive('\n') {
        for (offset, byte) in code(line).bytes().enumerate() {
            match byte {
                b'{' => depth += 1,
                b'}' => {
                    depth -= 1;
                    if depth == 0 {
                        return Some(at + offset + 1);
                    }
                }
                _ => {}
            }
        }
        at += line.len();
    }
    None
}

/// A line without its comment.
pub(super) fn code(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code)
}

/// Whether a character may be in a PTX identifier.
pub(super) fn is_identifier(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_and_declarations() {
        let text = "\
.extern .func  (.param .b32 r) vprintf
(
\t.param .b64 a
)
;
.func helper(.param .b32 x); // { not a body
.func  (.param .b32 func_retval0) helper(
\t.param .b32 helper_param_0
)
{
\tmov.b64 \t{%r1, %r2}, %rd1; // }
\tret;
}
.visible .entry k()
{
{
}
}
";
        let found = items(text).unwrap();
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found[0], Item::Undefined { name: "vprintf" });
        assert_eq!(found[1], Item::Function { name: "helper" });
        let Item::Entry {
            name,
            parameters,
            body,
        } = &found[2]
        else {
            panic!("{found:?}")
        };
        assert_eq!((*name, parameters.len()), ("k", 0));
        assert_eq!(&text[body.clone()], "{\n{\n}\n}");
    }

    #[test]
    fn an_open_body_is_refused() {
        assert!(
            items(".visible .entry k()\n{\n")
                .unwrap_err()
                .contains("no end")
        );
    }
}
