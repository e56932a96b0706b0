// The part "Machine": sliders of a model and of one or more machines, and what the planner says where they stand. All
// figures and pictures are the server's; a page that opens offline has answers that were recorded (recorded.py).
import { button, copyable, el, field, figure, keep, picture, recipes, table } from "./kit.js";

const SECOND = { cluster: "h100:64" }, LARGE = { recipe: "llama3-8b", sets: "", layout: "", price: "", ...SECOND };
const MOST_PROVEN = 8; // ranks that a proof on this machine has, at most

let made = 0; // sliders, for their names

/** A slider or a list of words, which stays the same element from answer to answer. moves(key, value) is called. */
function control({ key, range }, moves) {
  let values = [], words = [];
  const id = `slider-${++made}`, output = el("output", { for: id }), label = el("label", { for: id });
  const input = range ? el("input", { id, type: "range", min: 0, step: 1 }) : el("select", { id });
  const now = () => (range ? Number(input.value) : input.selectedIndex);
  const say = () => {
    output.textContent = words[now()] ?? "";
    if (range) input.setAttribute("aria-valuetext", output.textContent);
  };
  input.addEventListener("input", () => { say(); moves(key, values[now()]); });
  const row = el("div", { class: "slider" }, label, range && output, input);
  row.set = (one) => {
    ({ values, words } = one);
    label.textContent = one.label;
    input.disabled = values.length < 2;
    if (range) input.max = values.length - 1;
    else keep(input, values.map((value, i) => [value, words[i]]), String, ([value, text]) => el("option", { value }, text));
    if (range) input.value = one.at; else input.selectedIndex = one.at;
    say();
  };
  return row;
}

/** Sliders in a box, by the server's list. */
const sliders = (box, moves) => (list) => keep(box, list, (one) => `${one.key} ${one.range}`, (one) => control(one, moves));

/** One machine. Of moves that come while an answer is awaited, the last one is asked for. */
function machine(api, position, known, remove, model) {
  const title = el("h2", { tabindex: -1 }), box = el("div", { class: "sliders" }), wrong = el("div"), shown = el("div");
  const figures = el("dl", { class: "figures", "aria-live": "polite" });
  const rough = el("div", { class: "rough", hidden: true }, el("p", { class: "aside" }, "This machine has not been measured: its times are rough."),
    waits("Measure this machine (two minutes)", async () => { await api.post("machine/measure"); ask({}); }));
  const price = el("input", { type: "number", min: 0, step: "any", placeholder: "none" });
  const root = el("section", { class: "panel" }, el("div", { class: "row title" }, title, remove && button("Remove", remove)),
    box, !api.recorded && field("Price per device-hour", price), rough, figures, wrong, shown);
  const set = sliders(box, (move, to) => ask({ move, to }));
  price.addEventListener("change", () => ask({ move: "price", to: price.value }));
  let waiting = null, asking = false, opened = false, wide = 0; // pixels for which the pictures were made

  async function ask(given) {
    waiting = given;
    if (asking) return;
    asking = true;
    root.setAttribute("aria-busy", "true");
    while (waiting) {
      const one = waiting;
      waiting = null;
      try {
        wide = root.clientWidth;
        root.classList.toggle("wide", wide > 1000);
        const width = Math.round(wide > 1000 ? wide / 2 - 30 : wide || 600);
        const answer = await api.get("machine/plan", { ...position, ...one.position, move: one.move ?? "", to: one.to ?? "", width });
        if (!waiting) show(answer);
      } catch (error) { show({ problem: error.message, nearest: [] }); }
    }
    asking = false;
    root.removeAttribute("aria-busy");
  }

  const chosen = ({ words, position }) => button(words, async () => { await ask({ position }); title.focus(); });
  const problem = ({ problem, nearest, position: there }) => el("div", { class: "alarm", role: "alert" }, el("p", {}, problem),
    nearest.length ? el("p", {}, "Nearest: ", nearest.map(chosen)) : null, there ? null : button("Back", () => ask({})));

  /** A button for a command that takes long, with one to stop it. */
  function waits(words, action) {
    const stop = button("Stop", () => api.post("machine/stop"), { hidden: true });
    return el("span", { class: "row" }, button(words, async () => {
      stop.hidden = false;
      try { await action(); } finally { stop.hidden = true; }
    }), stop);
  }

  function search() {
    const found = el("div", {});
    return [waits("Find the fastest that fits", async () => {
      found.replaceChildren(el("p", {}, "Searching. A model of 8B on 64 devices takes seconds, one of 405B on 16,384 about half a minute."));
      try {
        const { words, nothing, rows } = await api.post("machine/search", position);
        found.replaceChildren(el("p", {}, words, " ", nothing), table(["Layout", "Speed", "Memory", ""],
          rows.map((row) => [...row.words, chosen({ words: "Show", position: row.position })])));
      } catch (error) { found.replaceChildren(el("p", { role: "alert" }, error.message)); }
    }), found];
  }

  const found = api.recorded ? [null, null] : search();
  function show(answer) {
    const { controls, here, fits, figures: facts = [], pictures = [], summary = [], command, train, toml } = answer;
    if (answer.position) position = answer.position;
    if (answer.title) title.textContent = position.recipe === model() ? answer.title : `${position.recipe} on ${answer.title}`;
    if (controls) {
      set(controls.filter((one) => !one.shared));
      if (document.activeElement !== price) price.value = position.price ?? "";
      known(answer);
    }
    root.classList.toggle("over", fits === false);
    root.classList.toggle("empty", !box.firstChild);
    figures.replaceChildren(...facts.map((one) => figure(...one)));
    const { problem: words, nearest, measure } = answer;
    rough.hidden = !measure;
    keep(wrong, words ? [answer] : [], () => JSON.stringify([words, nearest, !answer.position]), problem);
    shown.replaceChildren(...[
      facts.length > 0 && el("p", { class: "layout" }, position.layout.split(/(?<=,)/).flatMap((part) => [part, el("wbr")])),
      command && el("div", { class: "row" }, here && fits && !api.recorded &&
        button("Train this", () => api.go("train", "new", JSON.stringify(position)), { class: "main" }), fits && !api.recorded && answer.devices <= MOST_PROVEN &&
        button("Prove this layout", () => api.go("prove", position.layout, position.recipe, "", ...position.sets.split("\n").filter(Boolean))),
        !measure && found[0]), command && !measure && found[1],
      el("div", { class: "pictures" }, pictures.map(([name, note, svg]) =>
        el("figure", {}, picture(svg, name), el("figcaption", {}, note)))),
      command && el("details", { open: opened, ontoggle: (event) => { opened = event.target.open; } },
        el("summary", {}, "Command, recipe, and the plan in words"), copyable(command, "Plan"), copyable(train, "Train"),
        toml && copyable(toml, "Recipe"), summary.length > 0 && el("pre", { tabindex: 0 }, summary.join("\n"))),
    ].filter(Boolean));
  }
  let timer = 0;
  const resized = new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => { if (wide && Math.abs(wide - root.clientWidth) > 40) ask({}); }, 300);
  });
  resized.observe(root);
  return { root, ask, position: () => position, end: () => resized.disconnect() };
}

export async function show(root, api) {
  const [start, { recipes: about, families }] = await Promise.all([api.get("machine/start"), api.get("train/recipes")]), all = [];
  const box = el("div", { class: "sliders" }), facts = el("div", {}), machines = el("div", { class: "machines" });
  const same = (one) => one.position().recipe === recipe.value; // another model has its own size
  const set = sliders(box, (move, to) => all.filter(same).forEach((one) => one.ask({ move, to })));
  const recipe = recipes(families, api.place?.[0] ?? start.recipe), said = el("p", { class: "aside" });
  recipe.addEventListener("change", () => all.forEach((one) => one.ask({ move: "recipe", to: recipe.value })));

  function shared(answer) {
    set(answer.controls.filter((one) => one.shared));
    said.textContent = about[answer.position.recipe] ?? "";
    if (!answer.dial) return;
    const open = facts.firstChild?.open;
    facts.replaceChildren(el("details", { open }, el("summary", {}, "What the size sets, and where each value comes from"),
      table(["Field", "Value", "From"], answer.dial)));
  }
  function add(position) {
    const remove = () => { all.splice(all.indexOf(one), 1); one.root.remove(); one.end(); };
    const known = (answer) => { if (one === (all.find((each) => each.position().layout) ?? one)) shared(answer); };
    const one = machine(api, position, known, all.length ? remove : null, () => (api.recorded ? position.recipe : recipe.value));
    all.push(one);
    machines.append(one.root);
    return one.ask({});
  }
  const more = button("The same on 64 H100", () => add({ ...all[0].position(), layout: "", ...SECOND, price: "" }));
  root.append(...(api.recorded ? [] : [el("h1", {}, "Model and machine"), el("div", { class: "row" }, field("Recipe", recipe), more)]),
    el("section", { class: "model" }, said, box, facts), machines);
  await add(start.position ?? { recipe: recipe.value, sets: "", layout: "", cluster: `${start.local}:2`, price: "" });
  if (!api.recorded && !start.measured) await add(LARGE);
  return () => all.forEach((one) => one.end());
}
