"use strict";
// Steps through frames: {frames: [{cells, title, words, moves, now, at}], rows}. cells[rank] are shares, 0..1; moves are
// [source, target, adds]; now[rank] is what a rank does; rows[rank] are [start, end, colour, label] of a timeline.
const SVG = "http://www.w3.org/2000/svg", SIZE = 640, MIDDLE = SIZE / 2, RING = 240, ROW = 26;
function player(root) {
  const find = (name) => root.querySelector("." + name);
  const data = JSON.parse(find("data").textContent), stage = find("stage"), range = find("at");
  const ranks = data.frames[0].cells.length, last = data.frames.length - 1;
  const radius = Math.min(72, Math.max(20, 0.76 * RING * Math.sin(Math.PI / Math.max(2, ranks)))), grown = Math.max(1, radius / 42);
  stage.style.setProperty("--grown", grown);
  const ends = data.rows.flat().map((box) => box[1]), scale = (SIZE - 20) / Math.max(1e-12, ...ends);
  const high = SIZE + data.rows.length * (ROW + 4);
  stage.setAttribute("viewBox", `0 0 ${SIZE} ${high}`);
  const place = (rank) => {
    const angle = (2 * Math.PI * rank) / ranks - Math.PI / 2;
    return [MIDDLE + RING * Math.cos(angle), MIDDLE + RING * Math.sin(angle)];
  };
  function add(name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    stage.append(node);
  }
  function arrow([source, target, adds]) {
    const [ax, ay] = place(source), [bx, by] = place(target);
    const length = Math.hypot(bx - ax, by - ay) || 1, ux = (bx - ax) / length, uy = (by - ay) / length;
    const side = 5, gap = radius + 4; // beside the line, so that both directions are visible
    const [x1, y1] = [ax + ux * gap - uy * side, ay + uy * gap + ux * side];
    const [x2, y2] = [bx - ux * (gap + 8) - uy * side, by - uy * (gap + 8) + ux * side];
    const kind = adds ? "reduce" : "copy";
    add("line", { x1, y1, x2, y2, class: kind });
    const points = [[x2 + ux * 9, y2 + uy * 9], [x2 - uy * 4.5, y2 + ux * 4.5], [x2 + uy * 4.5, y2 - ux * 4.5]];
    add("polygon", { points: points.map((p) => p.join(",")).join(" "), class: kind });
  }
  function node(rank, cells, now) {
    const [x, y] = place(rank);
    add("circle", { cx: x, cy: y, r: radius, class: now ? "busy" : "" });
    add("text", { x, y: y - grown * (now === undefined ? 8 : 14) }, rank);
    if (now) add("text", { x, y: y + 0.67 * radius, class: "now" }, now);
    const width = Math.min(8 * grown, (1.5 * radius) / cells.length), left = x - (cells.length * width) / 2, tall = radius / 2.6;
    const top = y + grown * (now === undefined ? 1 : -8);
    cells.forEach((share, i) => {
      const at = { x: left + i * width, width: width * 0.9 };
      add("rect", { ...at, y: top, height: tall, class: "cell" });
      add("rect", { ...at, y: top + tall * (1 - share), height: tall * share, class: "full" });
    });
  }
  function timeline(rows, now) {
    rows.forEach((row, rank) => {
      const y = SIZE + rank * (ROW + 4);
      for (const [start, end, color, label] of row) {
        const wide = (end - start) * scale, x = 10 + start * scale;
        add("rect", { x, y, width: Math.max(0.5, wide - 1), height: ROW, class: `box ${color}${start > now ? " later" : ""}` });
        if (wide > 7 * label.length) add("text", { x: x + wide / 2, y: y + 17, class: "in" }, label);
      }
    });
    const x = 10 + now * scale;
    if (rows.length) add("line", { x1: x, x2: x, y1: SIZE - 6, y2: high, class: "cursor" });
  }
  function show() {
    const number = Number(range.value), frame = data.frames[number];
    stage.replaceChildren();
    frame.moves.forEach(arrow);
    frame.cells.forEach((cells, rank) => node(rank, cells, frame.now[rank]));
    timeline(data.rows, frame.at);
    find("where").textContent = frame.title;
    find("moves").textContent = frame.words;
    find("numbers").textContent = frame.values;
  }
  function step(by) {
    range.value = Number(range.value) + by;
    show();
  }
  let timer = null;
  function play() {
    if (timer === null && Number(range.value) === last) range.value = 0;
    if (timer !== null) clearInterval(timer);
    timer = timer === null ? setInterval(() => (Number(range.value) < last ? step(1) : play()), 900) : null;
    find("play").textContent = timer === null ? "Play" : "Stop";
    show();
  }
  range.addEventListener("input", show);
  find("back").addEventListener("click", () => step(-1));
  find("next").addEventListener("click", () => step(1));
  find("play").addEventListener("click", play);
  show();
  return { step, range, root };
}
const players = [...document.querySelectorAll(".player")].map(player);
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return; // the browser's own keys
  // the one that has the focus, or the first; a slider has its own keys
  const one = players.find((each) => each.root.contains(event.target)) || players[0];
  if (!one || event.target === one.range) return;
  if (event.key === "ArrowLeft") one.step(-1);
  if (event.key === "ArrowRight") one.step(1);
});
