// Shows the prediction at which the sliders stand. Every number was predicted by the program when it wrote the page
// (src/fivefold/plan/pages/grid.py says how they are packed); this script looks them up and draws. Text enters as text.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
const floats = new Float32Array(bytes(data.floats));
const starts = new Uint16Array(bytes(data.starts));
const inputs = data.axes.map((axis) => document.getElementById("s-" + axis.key));
const PP = data.axes.findIndex((axis) => axis.key === "pp");
const KIND = ["compute", "memory", "memory", "rest", "sent", "sent", "wait"]; // of data.shares, in their order

// Where each cell's numbers begin, in `floats` and in `starts`.
const places = [];
{
  let at = 0, first = 0;
  data.index.forEach((message, cell) => {
    places.push([at, first]);
    if (message) return;
    const pp = valuesOf(cell)[PP], head = floats.subarray(at, at + data.head.length);
    const drawn = head[data.head.indexOf("drawn")], stages = head[data.head.indexOf("stages")];
    at += data.head.length + data.shares.length + data.memory.length * pp + 3 * stages + data.operations.length;
    if (pp > 1) for (const row of data.schedules[pp + "," + drawn]) first += row.length;
  });
}

// The sliders' values in a cell, and the cell in which sliders stand at these positions.
function valuesOf(cell) {
  const values = [];
  for (const axis of data.axes.toReversed()) {
    values.unshift(axis.values[cell % axis.values.length]);
    cell = Math.floor(cell / axis.values.length);
  }
  return values;
}
const cellAt = (positions) => data.axes.reduce((cell, axis, i) => cell * axis.values.length + positions[i], 0);
const key = (values, names) => names.map((name) => values[data.axes.findIndex((a) => a.key === name)]).join();

// All that is predicted of a cell; { problem } where it cannot be.
function prediction(cell) {
  const values = valuesOf(cell), message = data.index[cell];
  if (message) return { values, problem: data.messages[message - 1] };
  let [at, first] = places[cell];
  const take = (count) => floats.subarray(at, (at += count));
  const head = take(data.head.length);
  const found = { values, layout: data.layouts[key(values, data.place)], pp: values[PP] };
  data.head.forEach((name, i) => (found[name] = head[i]));
  found.shares = take(data.shares.length);
  found.memory = Array.from({ length: found.pp }, () => take(data.memory.length));
  found.peak = Math.max(...found.memory.map(sum));
  const seconds = Array.from({ length: found.stages }, () => take(3));
  const spent = take(data.operations.length), work = data.work[key(values, data.workKey)];
  found.operations = data.operations
    .map((name, i) => ({ name, seconds: spent[i], intensity: work[i]?.[0], rate: work[i]?.[1] }))
    .filter((operation) => operation.seconds > 0)
    .sort((a, b) => b.seconds - a.seconds);
  found.rows = found.pp === 1 ? [] : data.schedules[found.pp + "," + found.drawn].map((row) =>
    row.map(([kind, stage, microbatch]) => {
      const [F, I, W] = seconds[stage], start = (starts[first++] / 65535) * found.makespan;
      return { kind, stage, microbatch, start, end: start + { F, I, W, B: I + W }[kind] };
    }));
  return found;
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const shown = (value, digits = 4) => value.toLocaleString("en", value >= 10 ** digits
  ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
const percent = (share) => (100 * share).toFixed(1) + "%";
const gib = (size) => size < GIB ? (1024 * size / GIB).toFixed(1) + " MiB" : (size / GIB).toFixed(1) + " GiB";
const time = (s) => s >= 1 ? shown(s) + " s" : s >= 1e-3 ? shown(s * 1e3) + " ms" : shown(s * 1e6) + " µs";
function unit(value, name) {
  const [factor, letter] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([f]) => value >= f) ?? [1, ""];
  return shown(value / factor, 3) + " " + letter + name;
}

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value; else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
const tip = (made, words) => (made.append(shape("title", {}, words)), made);
function picture(id, height, words, draw) {
  const box = document.getElementById(id), width = Math.max(260, box.clientWidth);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": words });
  draw(width, (...made) => svg.append(...made));
  box.replaceChildren(svg);
}
const bar = (kind, share, title) => {
  const made = element("i", { className: kind, title });
  made.style.width = 100 * share + "%";
  return made;
};

function drawMemory({ memory, limit }) {
  const most = Math.max(limit, ...memory.map(sum)), rows = document.getElementById("memory");
  rows.replaceChildren();
  memory.forEach((parts, stage) => {
    const words = data.memory.map((name, i) => `${name} ${gib(parts[i])}`).join(", ");
    const track = element("div", { className: "track", role: "img" }, ...data.memory.map((name, i) =>
      bar(name, parts[i] / most, `${name} ${gib(parts[i])}`)));
    track.setAttribute("aria-label", words);
    const mark = element("b", { className: "limit" });
    mark.style.left = `calc(${(100 * limit) / most}% - 2px)`;
    track.append(mark);
    rows.append(element("span", {}, `stage ${stage}`), track, element("span", { className: "end" }, gib(sum(parts))));
  });
}

function drawShares({ shares, step }) {
  const rows = document.getElementById("shares"), most = Math.max(...shares);
  rows.replaceChildren();
  data.shares.forEach((name, i) => {
    if (shares[i] < 0.0005 * step) return;
    const track = element("div", { className: "track" }, bar(KIND[i], shares[i] / most, time(shares[i])));
    rows.append(element("span", {}, name), track, element("span", { className: "end" }, percent(shares[i] / step)));
  });
}

function drawTimeline({ rows, makespan, drawn, microbatches, pp }) {
  document.getElementById("pipeline").hidden = pp === 1;
  if (pp === 1) return;
  const some = drawn < microbatches ? `${drawn} of the step's ${microbatches}` : `all ${drawn}`;
  document.getElementById("drawn").textContent =
    `${some} microbatches in ${time(makespan)}. Each further one repeats the middle.`;
  const left = 52, right = 76, high = 22, kinds = new Set(rows.flat().map((event) => event.kind));
  for (const item of document.querySelectorAll("#pipeline .keys li")) item.hidden = !kinds.has(item.firstChild.className);
  const words = rows.map((row, rank) => `rank ${rank} ${percent(idle(row, makespan))} idle`).join(", ");
  picture("timeline", rows.length * (high + 5), "Timeline of the pipeline: " + words, (width, add) => {
    const scale = (width - left - right) / makespan;
    rows.forEach((row, rank) => {
      const y = rank * (high + 5), own = Math.min(...row.map((event) => event.stage));
      add(shape("text", { x: left - 8, y: y + 15, "text-anchor": "end" }, `rank ${rank}`),
        shape("rect", { class: "idle", x: left, y, width: makespan * scale, height: high }),
        shape("text", { x: width - right + 8, y: y + 15 }, percent(idle(row, makespan)) + " idle"));
      for (const { kind, stage, microbatch, start, end } of row) {
        const x = left + start * scale, wide = (end - start) * scale, label = String(microbatch);
        add(tip(shape("rect", { class: kind + (stage > own ? " later" : ""), x, y, width: Math.max(0.3, wide - 0.8),
          height: high }), `${kind} of microbatch ${microbatch}, stage ${stage}: ${time(start)} to ${time(end)}`));
        if (wide > 6 + 6 * label.length) add(shape("text", { class: "on", x: x + wide / 2, y: y + 15 }, label));
      }
    });
  });
}
const idle = (row, makespan) => 1 - sum(row.map((event) => event.end - event.start)) / makespan;

const log = (low, high, from, to) => (value) => from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
const decades = (low, high) => Array.from({ length: 40 }, (_, i) => 10 ** (i - 20)).filter((v) => v >= low && v <= high);

function drawRoofline({ operations, step, flops, bandwidth }) {
  const ridge = flops / bandwidth, products = operations.filter((o) => o.intensity);
  const low = Math.min(ridge / 10, ...products.map((o) => o.intensity)) / 1.5;
  const high = Math.max(ridge * 10, ...products.map((o) => o.intensity)) * 1.5;
  const bottom = Math.min(low * bandwidth, ...products.map((o) => o.rate)) / 1.5, top = flops * 1.6;
  const words = operations.map((o) => `${o.name} ${percent(o.seconds / step)}, bound by ${bound(o, ridge)}`).join("; ");
  picture("roofline", 300, "Roofline: " + words, (width, add) => {
    const [left, strip, floor] = [74, 60, 262], x = log(low, high, left + strip, width - 10), y = log(bottom, top, floor, 8);
    for (const rate of decades(bottom, top)) add(
      shape("path", { class: "axis", d: `M${left} ${y(rate)}H${width - 10}` }),
      shape("text", { x: left - 6, y: y(rate) + 4, "text-anchor": "end" }, unit(rate, "FLOP/s")));
    for (const value of decades(low, high)) add(
      shape("path", { class: "axis", d: `M${x(value)} 8V${floor}` }),
      shape("text", { x: x(value), y: floor + 16, "text-anchor": "middle" }, shown(value)));
    add(shape("text", { x: width - 10, y: floor + 34, "text-anchor": "end" }, "FLOP per byte moved"),
      shape("text", { x: left + strip / 2 - 4, y: floor + 16, "text-anchor": "middle" }, "bytes"),
      shape("text", { x: left + strip / 2 - 4, y: floor + 30, "text-anchor": "middle" }, "only"),
      shape("path", { class: "axis", d: `M${left + strip - 8} 8V${floor}` }),
      shape("path", { class: "roof", d: `M${x(Math.max(low, bottom / bandwidth))} ` +
        `${y(Math.max(bottom, low * bandwidth))}L${x(ridge)} ${y(flops)}H${width - 10}` }),
      shape("text", { x: width - 10, y: y(flops) - 6, "text-anchor": "end" }, unit(flops, "FLOP/s")));
    let level = floor - 6;
    for (const o of operations) {
      const radius = Math.max(2.5, 40 * Math.sqrt(o.seconds / step / Math.PI)), kind = bound(o, ridge);
      const title = `${o.name}: ${percent(o.seconds / step)} of the step, bound by ${kind}`;
      if (!o.intensity) level -= radius;
      const [cx, cy] = o.intensity ? [x(o.intensity), y(o.rate)] : [left + strip / 2 - 4, level];
      if (!o.intensity) level -= radius + 3;
      add(tip(shape("circle", { class: kind, cx, cy, r: radius }), title));
    }
    for (const o of apart(products, x, y)) add(
      shape("text", { class: "name", x: x(o.intensity), y: y(o.rate) + o.below, "text-anchor": "middle" }, o.name));
  });
  const table = document.getElementById("operations");
  table.replaceChildren(...operations.map((o) => element("tr", {},
    element("th", { scope: "row" }, o.name),
    element("td", {}, o.intensity ? shown(o.intensity, 3) : "bytes only"),
    element("td", { className: "optional" }, o.intensity ? unit(o.rate, "FLOP/s") : ""),
    element("td", {}, percent(o.seconds / step)),
    element("td", {}, bound(o, ridge)))));
}
const bound = (operation, ridge) => (operation.intensity >= ridge ? "compute" : "memory");

// Of the products those whose names have room below their circle.
function apart(products, x, y) {
  const taken = [];
  return products.flatMap((o) => {
    const below = 26, place = [x(o.intensity), y(o.rate) + below], wide = 4 + 3.4 * o.name.length;
    if (taken.some(([a, b, w]) => Math.abs(a - place[0]) < w + wide && Math.abs(b - place[1]) < 14)) return [];
    taken.push([...place, wide]);
    return [{ ...o, below }];
  });
}

// The layouts on the grid for the model, batch and devices at hand.
function layoutsHere(positions) {
  const free = new Set(["microbatch_size", "tp", "pp", "zero"]);
  let all = [[]];
  data.axes.forEach((axis, i) => {
    const some = free.has(axis.key) ? [...axis.values.keys()] : [positions[i]];
    all = all.flatMap((start) => some.map((position) => [...start, position]));
  });
  return all.map((position) => ({ position, ...prediction(cellAt(position)) })).filter((found) => !found.problem);
}

// Of points those that no other beats in both memory and speed, by memory.
function unbeaten(points, limit) {
  let most = 0;
  return points.toSorted((a, b) => a.peak - b.peak || b.tokens_per_s - a.tokens_per_s)
    .filter((p) => p.peak <= limit && p.tokens_per_s > most && (most = p.tokens_per_s));
}

function scatter(id, points, best, limit, here) {
  const farthest = Math.min(Math.max(...points.map((p) => p.peak)), 2 * limit);
  const most = Math.max(...points.map((p) => p.tokens_per_s)) * 1.06, end = Math.max(limit, farthest) * 1.03;
  const inside = points.filter((p) => p.peak <= end);
  const words = best.map((p) => `${gib(p.peak)}: ${shown(p.tokens_per_s)} tokens/s`).join("; ");
  picture(id, 280, "Fastest layout for each memory: " + words, (width, add) => {
    const left = 58, floor = 240, x = (v) => left + ((width - left - 12) * v) / end, y = (v) => floor - ((floor - 10) * v) / most;
    for (const v of ticks(most)) add(shape("path", { class: "axis", d: `M${left} ${y(v)}H${width - 12}` }),
      shape("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, v >= 1e6 ? shown(v / 1e6) + "M" : v >= 1e4 ? shown(v / 1e3) + "k" : shown(v)));
    for (const v of ticks(end / GIB)) add(
      shape("text", { x: x(v * GIB), y: floor + 16, "text-anchor": "middle" }, shown(v)));
    add(shape("text", { x: width - 12, y: floor + 33, "text-anchor": "end" }, "GiB a device"),
      shape("text", { x: left + 6, y: 18 }, "tokens/s"),
      shape("path", { class: "limit", d: `M${x(limit)} 10V${floor}` }),
      shape("text", { x: x(limit) - 6, y: floor - 6, "text-anchor": "end" }, "limit"));
    for (const p of inside) add(tip(shape("circle", { class: "dot" + (p.peak > limit ? " over" : ""),
      cx: x(p.peak), cy: y(p.tokens_per_s), r: 3 }), label(p)));
    let path = "";
    best.forEach((p, i) => (path += i ? `H${x(p.peak)}V${y(p.tokens_per_s)}` : `M${x(p.peak)} ${y(p.tokens_per_s)}`));
    add(shape("path", { class: "best", d: path }));
    for (const p of best) add(tip(shape("circle", { class: "dot on-best", cx: x(p.peak), cy: y(p.tokens_per_s), r: 4 }), label(p)));
    if (here && here.peak <= end) add(tip(shape("circle", { class: "here", cx: x(here.peak), cy: y(here.tokens_per_s), r: 8 }), label(here)));
  });
}
const label = (p) => `${p.words ?? words(p)}: ${shown(p.tokens_per_s)} tokens/s, ${gib(p.peak)}`;
const words = (p) => `${p.layout}, microbatch ${key(p.values, ["microbatch_size"])}`;
function ticks(end) {
  const power = 10 ** Math.floor(Math.log10(end / 4)), gap = power * [5, 2, 1].find((f) => f * power <= end / 4);
  return Array.from({ length: Math.floor(end / gap) + 1 }, (_, i) => i * gap);
}

function drawFrontier(positions, here) {
  const points = layoutsHere(positions), best = unbeaten(points, here.limit);
  document.getElementById("reach").textContent =
    `${points.length} valid layouts and microbatches on the sliders for this model, batch and number of devices.`;
  scatter("frontier", points, best, here.limit, here);
  document.getElementById("best").replaceChildren(...best.toReversed().map((p) => {
    const button = element("button", { type: "button", className: "plain", onclick: () => go(p.position) }, "Show");
    button.setAttribute("aria-label", "Show " + words(p));
    return element("tr", {}, element("td", { className: "words" }, ...breakable(words(p))), element("td", {}, shown(p.tokens_per_s)),
      element("td", {}, gib(p.peak)), element("td", {}, button));
  }));
}

function drawCommand({ layout }, positions) {
  const options = data.axes.map((axis, i) => axis.options[positions[i]]).filter(Boolean);
  document.getElementById("command").textContent = [data.command, "--layout " + layout, ...options].join(" ");
}

// A layout's text, which may be broken behind its commas.
const breakable = (text) => text.split(/(?<=,)/).flatMap((part) => [part, element("wbr")]);

function figure(id, text, value) {
  const box = document.getElementById(id);
  box.textContent = text;
  box.dataset.value = value;
}

function show() {
  const positions = inputs.map((input) => Number(input.value)), found = prediction(cellAt(positions));
  data.axes.forEach((axis, i) => {
    const text = shown(found.values[i], 9);
    document.getElementById("o-" + axis.key).textContent = text;
    inputs[i].setAttribute("aria-valuetext", text);
  });
  const problem = document.getElementById("problem");
  problem.hidden = !found.problem;
  problem.textContent = found.problem ? "No such layout: " + found.problem : "";
  for (const box of document.querySelectorAll(".needs")) box.classList.toggle("gone", Boolean(found.problem));
  if (found.problem) {
    for (const id of ["step", "speed", "mfu", "peak"]) figure(id, "–", "");
    document.getElementById("room").textContent = "";
    return;
  }
  const fits = found.peak <= found.limit;
  figure("step", time(found.step), found.step);
  figure("speed", shown(found.tokens_per_s), found.tokens_per_s);
  figure("mfu", percent(found.mfu), found.mfu);
  figure("peak", gib(found.peak), found.peak);
  document.getElementById("room").textContent = fits ? `of ${gib(found.limit)}: fits` : `of ${gib(found.limit)}: does not fit`;
  document.getElementById("peak").closest("div").classList.toggle("over", !fits);
  document.getElementById("layout").replaceChildren(...breakable(found.layout),
    `; ${shown(found.microbatches)} ${found.microbatches === 1 ? "microbatch" : "microbatches"} of ${key(found.values, ["microbatch_size"])} in a step`);
  drawMemory(found);
  drawShares(found);
  drawTimeline(found);
  drawRoofline(found);
  drawFrontier(positions, found);
  drawCommand(found, positions);
}

function go(positions) {
  inputs.forEach((input, i) => (input.value = positions[i]));
  show();
}

for (const input of inputs) input.addEventListener("input", show);
document.getElementById("own").addEventListener("click", () => go(data.axes.map((axis) => axis.at)));
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; show(); drawSearch(); } });
function drawSearch() {
  if (data.search) scatter("search", data.search.rows, data.search.rows, data.search.limit, null);
}
show();
drawSearch();
