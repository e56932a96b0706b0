"use strict";
// Steps through the rounds of a collective. The page holds {ranks, rounds: [{moves, cells, words, end}]}; moves are
// [source, target, reduce], cells[rank] are shares of contributions, 0..1.
const data = JSON.parse(document.getElementById("data").textContent);
const stage = document.getElementById("stage"), range = document.getElementById("round");
const SVG = "http://www.w3.org/2000/svg", SIZE = 640, MIDDLE = SIZE / 2, RING = 240, NODE = data.ranks > 16 ? 20 : 40;
const place = (rank) => {
  const angle = (2 * Math.PI * rank) / data.ranks - Math.PI / 2;
  return [MIDDLE + RING * Math.cos(angle), MIDDLE + RING * Math.sin(angle)];
};
function add(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  stage.append(node);
}
function arrow([source, target, reduce]) {
  const [ax, ay] = place(source), [bx, by] = place(target);
  const length = Math.hypot(bx - ax, by - ay) || 1, ux = (bx - ax) / length, uy = (by - ay) / length;
  const side = 5, gap = NODE + 4; // beside the line, so that both directions are visible
  const [x1, y1] = [ax + ux * gap - uy * side, ay + uy * gap + ux * side];
  const [x2, y2] = [bx - ux * (gap + 8) - uy * side, by - uy * (gap + 8) + ux * side];
  const kind = reduce ? "reduce" : "copy";
  add("line", { x1, y1, x2, y2, class: kind });
  const points = [[x2 + ux * 9, y2 + uy * 9], [x2 - uy * 4.5, y2 + ux * 4.5], [x2 + uy * 4.5, y2 - ux * 4.5]];
  add("polygon", { points: points.map((p) => p.join(",")).join(" "), class: kind });
}
function node(rank, cells) {
  const [x, y] = place(rank);
  add("circle", { cx: x, cy: y, r: NODE });
  add("text", { x, y: y - 8 }, rank);
  const width = Math.min(8, (1.5 * NODE) / cells.length), left = x - (cells.length * width) / 2, high = NODE / 2.6;
  cells.forEach((share, i) => {
    add("rect", { x: left + i * width, y: y + 1, width: width * 0.9, height: high, class: "cell" });
    add("rect", { x: left + i * width, y: y + 1 + high * (1 - share), width: width * 0.9, height: high * share, class: "full" });
  });
}
function show() {
  const number = Number(range.value), round = data.rounds[number];
  stage.replaceChildren();
  round.moves.forEach(arrow);
  round.cells.forEach((cells, rank) => node(rank, cells));
  document.getElementById("where").textContent =
    number ? `round ${number} of ${data.rounds.length - 1}${round.end ? `, ${round.end}` : ""}` : "start";
  document.getElementById("moves").textContent = round.words;
}
function step(by) {
  range.value = Number(range.value) + by;
  show();
}
let timer = null;
function play() {
  const button = document.getElementById("play");
  if (timer === null && Number(range.value) === data.rounds.length - 1) range.value = 0;
  if (timer !== null) clearInterval(timer);
  timer = timer === null ? setInterval(() => (Number(range.value) < data.rounds.length - 1 ? step(1) : play()), 900) : null;
  button.textContent = timer === null ? "Play" : "Stop";
  show();
}
range.addEventListener("input", show);
document.getElementById("back").addEventListener("click", () => step(-1));
document.getElementById("next").addEventListener("click", () => step(1));
document.getElementById("play").addEventListener("click", play);
document.addEventListener("keydown", (event) => {
  if (event.target === range) return; // the slider has its own keys
  if (event.key === "ArrowLeft") step(-1);
  if (event.key === "ArrowRight") step(1);
});
show();
