// Runs the script of a player's page on a stand-in for its document, goes through the frames, and prints what each shows.
//   node player_page.js DATA.json SCRIPT.js CLASS...
"use strict";
const fs = require("fs");
const [data, script, ...classes] = process.argv.slice(2);
const nodes = {}, keys = [];
const element = (name) => ({
  name, attributes: {}, children: [], listeners: {}, textContent: "", value: "0",
  setAttribute(key, value) { this.attributes[key] = String(value); },
  append(child) { this.children.push(child); },
  replaceChildren() { this.children = []; },
  addEventListener(event, call) { this.listeners[event] = call; },
  style: { setProperty() {} },
});
for (const one of classes) nodes["." + one] = element(one);
nodes[".data"].textContent = fs.readFileSync(data, "utf8");
const root = { querySelector: (name) => nodes[name], contains: () => false };
global.document = {
  querySelectorAll: () => [root],
  createElementNS: (space, name) => element(name),
  addEventListener: (event, call) => keys.push(call),
};
eval(fs.readFileSync(script, "utf8"));
const drawn = (name, kind) => nodes[".stage"].children.filter(
  (c) => c.name === name && (!kind || c.attributes.class.split(" ").includes(kind)));
const shown = () => ({
  where: nodes[".where"].textContent, moves: nodes[".moves"].textContent, frame: Number(nodes[".at"].value),
  arrows: drawn("line").map((c) => c.attributes.class).filter((kind) => kind !== "cursor"),
  ranks: drawn("circle").length,
  busy: drawn("circle", "busy").length,
  full: drawn("rect", "full").map((c) => Number(c.attributes.height)),
  boxes: drawn("rect", "box").length,
  later: drawn("rect", "later").length,
});
const seen = [shown()];
for (let i = 1; i < JSON.parse(nodes[".data"].textContent).frames.length; i++) {
  if (i % 2) nodes[".next"].listeners.click();
  else keys[0]({ target: null, key: "ArrowRight" });
  seen.push(shown());
}
nodes[".back"].listeners.click();
seen.push(shown());
console.log(JSON.stringify(seen));
