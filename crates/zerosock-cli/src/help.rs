//! Help texts beside the flags: paragraphs that fit every width of a terminal.

/// A text for the end of a help page, whose paragraphs are broken in the source and joined here: the lines of
/// text at the margin, and those that explain an entry of a table, which are indented by [`TABLE`].
/// clap breaks them again where the terminal ends. All other lines stay as they are.
/// A line that ends a sentence or introduces commands ends its line here, too.
pub(crate) fn text(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut before = "";
    for line in source.lines() {
        if continues(before, line) {
            out.push(' ');
            out.push_str(line.trim_start());
        } else {
            if !out.is_empty() {
                out.push('\n');
            }
            out.push_str(line);
        }
        before = line;
    }
    out
}

/// Indentation of the text of a table.
const TABLE: usize = 10;

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Whether `line` goes on with the sentence of the line before it.
fn continues(before: &str, line: &str) -> bool {
    let at = indentation(line);
    let is_text = at == 0 || at == TABLE;
    let ends = |end: char| matches!(end, '.' | ':' | '\\');
    is_text
        && !line.is_empty()
        && !before.is_empty()
        && indentation(before) == at
        && !before.ends_with(ends)
}

#[cfg(test)]
#[path = "help_tests.rs"]
mod tests;
