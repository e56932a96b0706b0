// What the parts build their pages with. Text from anywhere becomes text nodes, never markup.

/** An element. attributes: `onclick` and the like are listeners, true sets one without a value, false and null none. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

/** A button that waits for its action and says what goes wrong. */
export const button = (words, action, attributes = {}) => {
  let mended = null;
  const made = el("button", { type: "button", ...attributes, onclick: async () => {
    made.disabled = true;
    mended?.();
    try { await action(); } catch (error) { mended = wrong(error, made); }
    made.disabled = false;
  } }, words);
  return made;
};

/** Says something at the bottom of the page, and to screen readers. What is bad stays until a click or the next part. */
let telling;
export function tell(words, bad = false) {
  const place = document.getElementById("told");
  place.textContent = words;
  place.className = bad ? "bad" : "";
  clearTimeout(telling);
  if (!bad) telling = setTimeout(() => { place.textContent = ""; }, 4000);
}

/** Says an error under the field that it names, and marks the field until it changes; else below `place`. Returns a
 * function that takes it back. */
export function wrong({ message, key }, place) {
  if (!place.isConnected) return tell(message, true);
  const name = (key ?? message).match(/^(?:--)?([a-z_]*)/)[1];
  const all = [...place.closest("section, .starter, .head, main > div").querySelectorAll("[name]")].filter((one) => one.checkVisibility());
  const field = all.find((one) => one.name === name && one.value) ?? all.find((one) => key && one.name === "set");
  const said = el("small", { class: "wrong", role: "alert" }, message);
  (field?.closest(".field") ?? place.closest(".row") ?? place.parentElement).append(said);
  field?.setAttribute("aria-invalid", "true");
  const mended = () => { said.remove(); field?.removeAttribute("aria-invalid"); };
  field?.addEventListener("input", mended, { once: true });
  return mended;
}

/** Text to copy, such as a command. */
export const copyable = (words, title) => el("figure", { class: "copy" }, title && el("figcaption", {}, title),
  el("pre", { tabindex: 0 }, words), button("Copy", async () => {
    await navigator.clipboard.writeText(words);
    tell("Copied");
  }, { "aria-label": `Copy ${title || "this text"}` }));

/** A picture of the program's drawing kit. What could act or load is left out; its style is the page's. */
export function picture(text, label) {
  const made = new DOMParser().parseFromString(text.replace(/<style>[^]*?<\/style>/g, ""), "image/svg+xml").documentElement;
  if (made.localName !== "svg") throw Error("This is no picture");
  for (const node of made.querySelectorAll("*")) {
    if (["script", "style", "foreignObject", "image", "use", "a", "animate", "set"].includes(node.localName)) node.remove();
  }
  for (const node of [made, ...made.querySelectorAll("*")]) {
    for (const { name } of [...node.attributes]) if (/^on|href|^style$/i.test(name)) node.removeAttribute(name);
  }
  return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, document.importNode(made, true));
}

/** A table. rows: arrays of text or elements; the first cell names its row. label: for screen readers. */
export const table = (head, rows, label = "Table") => el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label },
  el("table", {}, el("thead", {}, el("tr", {}, head.map((cell) => el("th", { scope: "col" }, cell)))), el("tbody", {}, trs(rows))));
export const trs = (rows) => rows.map(([first, ...cells]) =>
  el("tr", {}, el("th", { scope: "row" }, first), cells.map((cell) => el("td", {}, cell))));

/** Shows a list in a place. What was there by its key stays the same element: it keeps the focus, a select stays open, and
 * a screen reader does not say it again. make: an element of one, whose `set`, if it has one, takes what is new of it. */
export function keep(place, list, key, make) {
  const before = place.kept ?? new Map(), now = place.kept = new Map(), focus = document.activeElement;
  for (const one of list) {
    const name = key(one), element = before.get(name) ?? make(one);
    now.set(name, element);
    element.set?.(one);
  }
  for (const [name, element] of before) if (now.get(name) !== element) element.remove();
  [...now.values()].forEach((element, i) => { if (place.children[i] !== element) place.insertBefore(element, place.children[i] ?? null); });
  if (place.contains(focus) && focus !== document.activeElement) focus.focus({ preventScroll: true }); // what moves loses it
}

/** Recipes by family: {family: names}. One that is not among them is a run's. */
export function recipes(families, chosen) {
  const known = Object.values(families).flat().includes(chosen);
  const made = el("select", { name: "recipe" }, !known && chosen && el("option", {}, chosen),
    Object.entries(families).map(([label, names]) => el("optgroup", { label }, options(names))));
  made.value = chosen;
  return made;
}
export const options = (names) => names.map((name) => el("option", {}, name));

/** Recipe fields, one per line. */
export const fields = (value, placeholder) => el("textarea", { name: "set", rows: 3, cols: 40, placeholder, spellcheck: "false" }, value);
export const lines = (area) => area.value.split("\n").map((line) => line.trim()).filter(Boolean);

/** A field with its label. */
export const field = (words, input, note) => el("label", { class: "field" }, el("span", {}, words), input, note && el("small", {}, note));

/** A figure with its title, for a list of the class `figures`. */
export const figure = (title, value, note, main) =>
  el("div", { class: main && "main" }, el("dt", {}, title), el("dd", {}, value, note && el("small", {}, note)));

/** Four digits and a letter: 13.82M, 1,234, 0.123. */
export function short(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  for (const [factor, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= factor) return `${+(value / (letter === "k" ? 1e3 : factor)).toPrecision(4)}${letter}`;
  return Math.abs(value) < 1000 ? `${+value.toPrecision(4)}` : Math.round(value).toLocaleString("en");
}

export const bytes = (value) => {
  for (const [factor, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (value >= factor) return `${+(value / factor).toPrecision(3)} ${unit}`;
  return value == null ? "–" : `${Math.round(value)} B`;
};

export const time = (seconds) => {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 9.95) return `${+seconds.toPrecision(2)} s`;
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)} min ${two(s % 60)} s` : `${Math.floor(s / 3600)} h ${two(Math.floor(s / 60) % 60)} min`;
};

/** A colour of the page's palette: `--c0` to `--c6`, `--soft`, `--rule`, ... */
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
