//! Checks docs/behaviours.md, which says where each behaviour is tested.
//!
//! # Invariants
//! - The sides, not the test, determine the cell of the table, so that no setting is forgotten.

use super::side::Pair;

const TABLE: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/behaviours.md"
));

/// The row of a behaviour.
#[derive(Copy, Clone, Debug)]
struct Row<'t> {
    name: &'t str,
    processes: &'t str,
    guests: [(&'static str, &'t str); 2],
    siblings: &'t str,
}

fn rows() -> impl Iterator<Item = Row<'static>> {
    TABLE.lines().filter_map(|line| {
        let line = line.strip_prefix('|')?.strip_suffix('|')?;
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, processes, old, new, siblings] = cells[..] else {
            panic!("six cells: {line}");
        };
        let name = name.strip_prefix('`')?.strip_suffix('`')?;
        Some(Row {
            name,
            processes,
            guests: [("6.1", old), ("6.12", new)],
            siblings,
        })
    })
}

fn claims(cell: &str, what: &str) -> bool {
    cell.split(',').any(|word| word.trim() == what)
}

/// Whether the row says that it is tested between these two; `None`: there is no such column.
fn claimed(row: Row, pair: &Pair, pairs: u16) -> Option<bool> {
    let release = |(major, minor)| format!("{major}.{minor}");
    let guest = |kernel, role| {
        let (_, cell) = row.guests.iter().find(|it| it.0 == release(kernel))?;
        Some(claims(cell, role))
    };
    match (pair.client.kernel(), pair.server.kernel()) {
        (None, None) => Some(claims(row.processes, &pairs.to_string())),
        (Some(kernel), None) => guest(kernel, "client"),
        (None, Some(kernel)) => guest(kernel, "server"),
        (Some(kernel), Some(_)) => {
            let known = row.guests.iter().any(|it| it.0 == release(kernel));
            known.then(|| claims(row.siblings, &release(kernel)))
        }
    }
}

/// Whether a guest with this kernel shows the behaviour in this role, `client` or `server`, with no guest at the other end.
pub(crate) fn shown_by_guest(name: &str, kernel: &str, role: &str) -> bool {
    let row = rows().find(|row| row.name == name);
    let mut cells = row.iter().flat_map(|row| row.guests);
    cells.any(|(of, cell)| of == kernel && claims(cell, role))
}

/// Panics unless the table agrees with the outcome.
pub(super) fn check(name: &str, pair: &Pair, pairs: u16, shown: bool) {
    let row = rows().find(|row| row.name == name);
    let row = row.expect("each behaviour has a row in docs/behaviours.md");
    if let Some(claimed) = claimed(row, pair, pairs) {
        assert_eq!(claimed, shown, "docs/behaviours.md says otherwise: {row:?}");
    }
}

/// The names of the table's rows, in its order.
pub(crate) fn names() -> Vec<&'static str> {
    rows().map(|row| row.name).collect()
}

/// The names of those tested between processes.
pub(crate) fn between_processes() -> Vec<&'static str> {
    let shown = rows().filter(|row| claims(row.processes, "1"));
    shown.map(|row| row.name).collect()
}
