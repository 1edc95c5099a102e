//! The page of a long run: a chart for each curve, with a mark for each event.

use std::fmt::Write as _;

use super::lab::Event;
use super::samples::{CURVES, Counts};

const WIDTH: f64 = 1200.0;
const HEIGHT: f64 = 150.0;
const COLOURS: [(&str, &str); 5] = [
    ("kill", "#d22"),
    ("upgrade", "#28c"),
    ("reload", "#c8c"),
    ("guest reset", "#dda"),
    ("processes killed", "#ccc"),
];

/// Draws one page without any other file.
pub(super) fn draw(samples: &[Counts], events: &[Event], began: f64, text: &str) -> String {
    let mut page = String::from(
        "<!DOCTYPE html><meta charset=utf-8><title>zerosock: a long run</title>\
         <style>body{font:14px sans-serif;margin:20px}svg{background:#fafafa;display:block}\
         polyline{fill:none;stroke:#000;vector-effect:non-scaling-stroke}</style><h1>A long run</h1><p>",
    );
    for (kind, colour) in COLOURS {
        let _ = write!(
            page,
            "<span style='color:{colour}'>&#9632;</span> {kind} &nbsp; "
        );
    }
    let seconds = samples.last().map_or(1.0, |it| it.at - began).max(1.0);
    let x = |at: f64| ((at - began) / seconds * WIDTH).clamp(0.0, WIDTH);
    for (name, value, _) in &CURVES {
        let most = samples.iter().map(value).fold(0.0, f64::max).max(1e-9);
        let _ = write!(
            page,
            "<h3>{name}: 0 to {most:.2}, {seconds:.0} s</h3><svg width={WIDTH} height={HEIGHT}>"
        );
        for event in events.iter().filter(|event| event.begin >= began) {
            let colour = COLOURS
                .iter()
                .find(|(kind, _)| *kind == event.kind)
                .map_or("#000", |it| it.1);
            let at = x(event.begin);
            let _ = write!(
                page,
                "<line x1={at:.1} x2={at:.1} y1=0 y2={HEIGHT} stroke='{colour}'/>"
            );
        }
        page += "<polyline points='";
        for sample in samples {
            let y = HEIGHT - value(sample) / most * (HEIGHT - 5.0);
            let _ = write!(page, "{:.1},{y:.1} ", x(sample.at));
        }
        page += "'/></svg>";
    }
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = write!(page, "<h3>Summary</h3><pre>{text}</pre>");
    page
}
