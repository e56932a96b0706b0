// Runs the script of a collective's page on a stand-in for its document, goes through the rounds, and prints what each
// shows.   node collective_page.js DATA.json SCRIPT.js ID...
"use strict";
const fs = require("fs");
const [data, script, ...ids] = process.argv.slice(2);
const nodes = {}, keys = [];
const element = (id, name) => ({
  id, name, attributes: {}, children: [], listeners: {}, textContent: "", value: "0",
  setAttribute(key, value) { this.attributes[key] = String(value); },
  append(child) { this.children.push(child); },
  replaceChildren() { this.children = []; },
  addEventListener(event, call) { this.listeners[event] = call; },
});
for (const id of ids) nodes[id] = element(id);
nodes.data.textContent = fs.readFileSync(data, "utf8");
global.document = {
  getElementById: (id) => nodes[id],
  createElementNS: (space, name) => element("", name),
  addEventListener: (event, call) => keys.push(call),
};
eval(fs.readFileSync(script, "utf8"));
const shown = () => ({
  where: nodes.where.textContent, moves: nodes.moves.textContent, round: Number(nodes.round.value),
  arrows: nodes.stage.children.filter((c) => c.name === "line").map((c) => c.attributes.class),
  ranks: nodes.stage.children.filter((c) => c.name === "circle").length,
  full: nodes.stage.children.filter((c) => c.attributes.class === "full").map((c) => Number(c.attributes.height)),
});
const seen = [shown()];
for (let i = 1; i < JSON.parse(nodes.data.textContent).rounds.length; i++) {
  if (i % 2) nodes.next.listeners.click();
  else keys[0]({ target: null, key: "ArrowRight" });
  seen.push(shown());
}
nodes.back.listeners.click();
seen.push(shown());
console.log(JSON.stringify(seen));
