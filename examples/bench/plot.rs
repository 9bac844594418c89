//! Line charts as SVG, both axes logarithmic.

use std::fmt::Write as _;

/// One line.
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 55.0;

/// Decades that hold every value.
struct Axis {
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64> + Clone) -> Self {
        let least = values.clone().fold(f64::INFINITY, f64::min).max(1.0);
        let most = values.fold(1.0, f64::max);
        let from = least.log10().floor();
        Self { from, to: most.log10().ceil().max(from + 1.0) }
    }

    /// Where a value lies, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        (value.max(1.0).log10() - self.from) / (self.to - self.from)
    }

    fn decades(&self) -> impl Iterator<Item = f64> {
        std::iter::successors(Some(self.from), |power| Some(power + 1.0))
            .take_while(|power| *power <= self.to)
            .map(|power| 10f64.powf(power))
            .collect::<Vec<_>>()
            .into_iter()
    }
}

fn short(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{}M", value / 1e6),
        value if value >= 1e3 => format!("{}k", value / 1e3),
        value => format!("{value}"),
    }
}

/// The whole picture.
pub fn chart(title: &str, x_name: &str, y_name: &str, series: &[Series]) -> String {
    let points = || series.iter().flat_map(|series| series.points.iter());
    let x_axis = Axis::over(points().map(|(x, _)| *x));
    let y_axis = Axis::over(points().map(|(_, y)| *y));
    let x_at = |value| LEFT + x_axis.place(value) * (WIDTH - LEFT - RIGHT);
    let y_at = |value| HEIGHT - BOTTOM - y_axis.place(value) * (HEIGHT - TOP - BOTTOM);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>{title}</title>\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{title}</text>\n"
    );
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    for value in x_axis.decades() {
        let x = x_at(value);
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {TOP}V{bottom}\" stroke=\"#ddd\"/><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 18.0,
            short(value)
        );
    }
    for value in y_axis.decades() {
        let y = y_at(value);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            y + 4.0,
            short(value)
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{x_name}</text>\
         <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">{y_name}</text>",
        f64::midpoint(LEFT, right),
        HEIGHT - 12.0,
        f64::midpoint(TOP, bottom)
    );
    let mut legend = TOP + 8.0;
    for (series, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let line: Vec<String> =
            series.points.iter().map(|(x, y)| format!("{:.1},{:.1}", x_at(*x), y_at(*y))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            line.join(" ")
        );
        for (x, y) in &series.points {
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                x_at(*x),
                y_at(*y)
            );
        }
        let _ = writeln!(
            svg,
            "<path d=\"M{:.1} {legend}h18\" stroke=\"{colour}\" stroke-width=\"2\"/><text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            right + 10.0,
            right + 33.0,
            legend + 4.0,
            series.name
        );
        legend += 20.0;
    }
    svg + "</svg>\n"
}
