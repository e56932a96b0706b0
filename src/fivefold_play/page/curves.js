// Curves by uPlot, in the page's colours: drag to zoom, double-click to see all, values under the pointer in the legend.
import { color, el, short } from "./kit.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const FONT = "12px system-ui, sans-serif";
const WHOLE = Array.from({ length: 30 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3)); // between ticks of steps

/** Draws into `place`. series: [{label, color: a variable's name, width, dash, dots}]; options: {across, log, height,
 * spread: places are logarithmic, show: value => text}. Returns {set(data), log(on), last(share), end()}; data: [places,
 * values, ...], with null. */
export function curves(place, series, options = {}) {
  let plot, data = [[], ...series.map(() => [])], logarithmic = Boolean(options.log), share = 1, zoomed = false;
  const show = options.show || short;
  const height = () => options.height || (innerHeight < 560 ? 220 : 320); // a projector's window, or a phone's on its side

  const axis = (more) => ({ stroke: color("soft"), font: FONT, grid: { stroke: color("grid"), width: 1 },
    ticks: { stroke: color("grid"), width: 1 }, values: (u, ticks) => ticks.map((v) => (v == null ? "" : show(v))), ...more });
  const line = (one) => ({ label: one.label, stroke: color(one.color), width: one.width || 1.75, dash: one.dash, spanGaps: true,
    points: one.dots ? { show: true, size: 6, fill: color(one.color) } : { show: false },
    value: (u, v) => (v == null ? "–" : show(v)) });

  /** Ticks of a logarithmic axis: 1, 2, 5, 10, ..., and finer ones where the values lie close together. */
  function ticks(u, at, low, high) {
    for (const steps of [[1], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9], Array.from({ length: 90 }, (_, i) => 1 + i / 10)]) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
        for (const step of steps) found.push(+(step * 10 ** power).toPrecision(3));
      const inside = found.filter((v) => v >= low && v <= high);
      if (inside.length > 3) return inside.length > 12 ? inside.filter((v, i) => i % Math.ceil(inside.length / 10) === 0) : inside;
    }
    return [low, high];
  }

  const own = { splits: ticks, filter: (u, found) => found };

  function range(u, low, high) {
    if (low == null || !Number.isFinite(low)) return logarithmic ? [1, 10] : [0, 1];
    if (logarithmic) return low > 0 ? [low / 1.05, high * 1.05] : [1e-3, Math.max(1, high)];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [options.zero ? 0 : low - room, high + room];
  }

  function make() {
    plot?.destroy();
    place.replaceChildren();
    plot = new uPlot({
      width: place.clientWidth || 600, height: height(),
      scales: { x: { time: false, ...(options.spread && { distr: 3, range: (u, low, high) => [low, high] }) }, y: { distr: logarithmic ? 3 : 1, range } },
      axes: [axis({ values: (u, found) => found.map((v) => short(v)), size: 34, label: options.across, labelSize: 18, labelFont: FONT,
        ...(/^step$/i.test(options.across) && { incrs: WHOLE }), ...(options.spread && own) }), axis({ size: 64, ...(logarithmic && own) })],
      series: [{ label: options.across || "Step", value: (u, v) => (v == null ? "–" : short(v)) }, ...series.map(line)],
      cursor: { drag: { x: true, y: false }, sync: options.sync && { key: options.sync } },
      legend: { live: true },
      hooks: { setSelect: [(u) => { zoomed = u.select.width > 0; }] },
    }, data, place);
    plot.over.addEventListener("dblclick", () => { zoomed = false; });
    cut();
  }

  /** The last part of the places, if it was chosen. */
  function cut() {
    const x = data[0];
    if (share < 1 && x.length) plot.setScale("x", { min: x[Math.floor((x.length - 1) * (1 - share))], max: x[x.length - 1] });
  }

  make();
  const size = new ResizeObserver(() => { if (place.clientWidth) plot.setSize({ width: place.clientWidth, height: height() }); });
  size.observe(place);
  dark.addEventListener("change", make);
  return {
    set(values) { data = values; plot.setData(data, !zoomed); if (zoomed) plot.redraw(); else cut(); },
    log(on) { logarithmic = on; make(); },
    last(part) { share = part; zoomed = false; plot.setData(data); cut(); },
    end() { size.disconnect(); dark.removeEventListener("change", make); plot.destroy(); },
  };
}

/** A running mean, of which each value counts less by `weight` a step: 0 leaves the values as they are. Nulls stay out.
 * The function takes all values so far, and goes on where it was; `again` starts anew. */
export function smoother() {
  let out = [], sum = 0, whole = 0, before = null;
  return (values, weight, again) => {
    if (again || weight !== before || values.length < out.length) [out, sum, whole, before] = [[], 0, 0, weight];
    for (let i = out.length; i < values.length; i++) {
      if (values[i] != null) {
        sum = sum * weight + values[i];
        whole = whole * weight + 1;
      }
      out.push(values[i] == null ? null : sum / whole);
    }
    return out;
  };
}

/** A choice of how much is shown, for those who do not drag. */
export const spans = (choose) => el("select", { "aria-label": "Shown", onchange: (event) => choose(Number(event.target.value)) },
  [[1, "all steps"], [0.5, "last half"], [0.1, "last tenth"], [0.02, "last fiftieth"]].map(([value, words]) => el("option", { value }, words)));
