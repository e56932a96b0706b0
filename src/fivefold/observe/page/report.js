// Numbers under the cursor, on every chart at the same step; with a mouse, a finger or the arrow keys.
// The page is complete without this script. Everything from the data enters as text, never as markup.
"use strict";

const charts = [...document.querySelectorAll("[data-chart]")].map((plot) => ({
  plot,
  cursor: plot.querySelector(".cursor"),
  values: plot.querySelector(".values"),
  ...JSON.parse(plot.dataset.chart),
}));

// Index of the entry of the ascending list `x` that is nearest to `step`.
function nearest(x, step) {
  let low = 0, high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] < step) low = middle; else high = middle;
  }
  return step - x[low] <= x[high] - step ? low : high;
}

function shown(value, unit) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  const digits = size && (size < 1e-3 || size >= 1e9)
    ? value.toExponential(2)
    : value.toLocaleString("en", size >= 1e3 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });
  return digits + (unit === "%" || !unit ? unit : " " + unit);
}

function row(box, name, value) {
  const line = document.createElement("div");
  const label = document.createElement("span");
  const number = document.createElement("b");
  label.textContent = name;
  number.textContent = value;
  line.append(label, number);
  box.append(line);
}

// Where `step` lies between the ends of a chart's x axis, from 0 to 1.
const partOf = (chart, step) => (step - chart.span[0]) / (chart.span[1] - chart.span[0]);

function point(step, active) {
  for (const chart of charts) {
    const part = partOf(chart, step);
    chart.cursor.hidden = false;
    chart.cursor.style.left = 100 * part + "%";
    chart.values.hidden = chart !== active;
    if (chart !== active) continue;
    chart.values.replaceChildren();
    row(chart.values, "step", step.toLocaleString("en"));
    for (const line of chart.lines) {
      const at = nearest(line.x, step);
      const elsewhere = line.x[at] !== step ? " (step " + line.x[at].toLocaleString("en") + ")" : "";
      const second = chart.right && line.y[at] !== null
        ? ", " + shown(line.y[at] * chart.right[0], chart.right[1]) : "";
      row(chart.values, line.name + elsewhere, shown(line.y[at], chart.unit) + second);
    }
    chart.values.classList.toggle("flip", part > 0.5);
    chart.values.style.left = part > 0.5 ? "" : 100 * part + "%";
    chart.values.style.right = part > 0.5 ? 100 - 100 * part + "%" : "";
  }
}

function leave() {
  for (const chart of charts) chart.cursor.hidden = chart.values.hidden = true;
}

for (const chart of charts) {
  const x = chart.lines.reduce((a, b) => b.x.length > a.length ? b.x : a, []);
  let at = x.length - 1;
  const go = (index) => {
    at = Math.min(Math.max(index, 0), x.length - 1);
    point(x[at], chart);
  };
  chart.plot.addEventListener("pointermove", (event) => {
    const box = chart.plot.getBoundingClientRect();
    const part = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    go(nearest(x, chart.span[0] + part * (chart.span[1] - chart.span[0])));
  });
  chart.plot.addEventListener("pointerleave", leave);
  chart.plot.addEventListener("focus", () => { if (chart.plot.matches(":focus-visible")) go(at); });
  chart.plot.addEventListener("blur", leave);
  chart.plot.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(x.length / 20));
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at - page, PageUp: at + page, Home: 0, End: x.length };
    if (event.key in moves) { event.preventDefault(); go(moves[event.key]); }
    if (event.key === "Escape") leave();
  });
}
