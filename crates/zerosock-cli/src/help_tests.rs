//! Unit tests of `help`.

use clap::CommandFactory;

use super::*;
use crate::args::Cli;

#[test]
fn lines_of_a_sentence_are_joined_and_commands_are_not() {
    let source = "A sentence\nof two lines. And\na half.\nAnother:\n  command \\\n    more\n\nUNIX:\n  \
                      unix:PATH\n          a Unix\n          socket";
    let joined = "A sentence of two lines. And a half.\nAnother:\n  command \\\n    more\n\nUNIX:\n  \
                      unix:PATH\n          a Unix socket";
    assert_eq!(text(source), joined);
}

/// A line of a help page may end inside a sentence only where the next word does not fit.
#[test]
fn no_sentence_is_broken_before_the_end_of_the_line() {
    for width in [60, 80, 100] {
        let mut root = Cli::command().max_term_width(width).term_width(width);
        root.build();
        let commands = root.get_subcommands().filter(|one| !one.is_hide_set());
        for page in [&root].into_iter().chain(commands) {
            let help = page.clone().max_term_width(width).term_width(width);
            let help = help.clone().render_long_help().to_string();
            let lines: Vec<&str> = help.lines().collect();
            for pair in lines.windows(2) {
                let (line, next) = (pair[0], pair[1]);
                let at = indentation(line);
                let is_text = at == 0 || at == TABLE;
                let ends = |end: char| !end.is_alphanumeric() && !matches!(end, ',' | ')' | '`');
                if !is_text
                    || at != indentation(next)
                    || line.trim().is_empty()
                    || line.ends_with(ends)
                {
                    continue;
                }
                let word = next.split_whitespace().next().unwrap_or_default();
                if word == "-" {
                    // The next value of an option.
                    continue;
                }
                assert!(
                    next.trim().is_empty()
                        || line.chars().count() + 1 + word.chars().count() > width,
                    "{} at {width} columns:\n{line}\n{next}",
                    page.get_name()
                );
            }
        }
    }
}
