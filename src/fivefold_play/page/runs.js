// Runs: all of them with their figures, some side by side, and what can be made of one.
import { button, copyable, el, field, keep, picture, table, tell } from "./kit.js";
import { curves, spans } from "./curves.js";
import { state } from "./train.js";

const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];

export async function show(root, api) {
  const rows = new Map(), picked = new Set(api.place);
  let titles = null, keys = [], best = {}, order = "", down = false, plot = null, turn = 0;
  const filter = el("input", { type: "search", size: 26, placeholder: "name, layout, architecture", oninput: () => list() });
  const sweeps = el("div", { class: "row" }), live = !api.recorded, more = el("div"), none = el("p", { class: "none" });
  const all = table(["Run", ...(live ? ["More", "State"] : []), "Layout"], [], "Runs");
  const [heads, body] = all.querySelectorAll("tr, tbody"), fixed = [...heads.children];
  const axis = el("select", { onchange: () => draw() }), kind = el("select", { "aria-label": "Loss", onchange: () => draw() });
  const span = spans((share) => plot?.last(share)), shown = el("div"), beside = el("section", { hidden: true },
    el("h2", {}, "Side by side"), el("div", { class: "row" }, el("label", {}, "over ", axis), kind, span), shown);
  root.append(...(live ? [el("h1", {}, "Runs")] : []), el("div", { class: "row" }, field("Filter", filter),
    button("Compare", () => compare(), { class: "main" }), sweeps), el("div", { class: "words" }, all, none), more, beside);

  function list() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => `${row.name} ${row.layout} ${row.arch} ${row.kind}`.toLowerCase();
    const found = [...rows.values()].filter((row) => words.every((word) => text(row).includes(word)));
    if (order) found.sort((a, b) => ((a.figures?.[order] ?? Infinity) - (b.figures?.[order] ?? Infinity)) * (down ? -1 : 1));
    keys = Object.keys(titles ?? {}).filter((key) => found.some((row) => row.shown?.[key] != null));
    keep(heads, [...fixed, ...keys], (key) => key.textContent ?? key, (key) => (key.textContent ? key : head(key)));
    keep(body, found, (row) => row.name, line);
    [all.hidden, none.hidden] = [!found.length, found.length > 0];
    none.textContent = rows.size ? "No run matches." : "There is no run here yet. Train one.";
  }

  function head(key) {
    const sign = el("span"), made = el("th", { scope: "col" }, el("button", { type: "button", class: "plain",
      onclick: () => { down = order === key && !down; order = key; list(); } }, titles[key], sign));
    made.set = () => { sign.textContent = order === key ? (down ? " ↓" : " ↑") : ""; };
    return made;
  }

  /** A row of the table: its box, button and link stay, whatever its run does. */
  function line({ name, label }) {
    const box = el("input", { type: "checkbox", onchange: () => (box.checked ? picked.add(name) : picked.delete(name)) });
    const link = el("a", { href: `#train/${encodeURIComponent(name)}` }), layout = el("td");
    const about_ = button("More", () => about(name), { "aria-label": `More on ${name}` });
    const made = el("tr", {}, el("th", { scope: "row" }, el("label", {}, box, " ", label ?? name)),
      live && [about_, link].map((one) => el("td", {}, one)), layout);
    made.set = (row) => {
      box.checked = picked.has(name);
      if (live) link.textContent = row.kind ? state(row) : "...";
      layout.textContent = row.layout || row.problem || "";
      while (made.lastChild !== layout) made.lastChild.remove();
      made.append(...keys.map((key) => el("td", {}, box.checked && best[key] != null && row.figures?.[key] === best[key]
        ? el("b", {}, row.shown[key]) : row.shown?.[key] ?? "")));
    };
    return made;
  }

  async function about(name) {
    const found = await api.get("train/about", { run: name });
    const query = new URLSearchParams({ run: name });
    more.replaceChildren(el("section", {}, el("h2", {}, name), el("div", { class: "row" },
      el("a", { href: `/api/runs/report?${query}`, download: true }, "Report, one file"),
      button("Export to Hugging Face", async () => {
        tell("Exporting...");
        const made = await api.post("runs/export", { run: name });
        more.append(copyable(made.command, `Written to ${made.folder} by`));
      })), copyable(found.command, "Repeat the run"), copyable(found.resume, "Resume it"), copyable(found.recipe, "recipe.toml")));
    more.querySelector("a").focus();
  }

  async function compare() {
    if (!picked.size) throw Error("Choose runs to compare by their boxes");
    const now = ++turn, across = axis.value || "step";
    const found = await api.get("runs/compare", { runs: JSON.stringify([...picked]), axis: across });
    if (now !== turn || !root.isConnected) return; // something else was chosen meanwhile
    keep(axis, found.axes, String, (one) => el("option", {}, one));
    keep(kind, Object.entries(found.kinds), String, ([value, words]) => el("option", { value }, words));
    const names = found.runs.map((run) => run.name);
    const lines = found.runs.map(({ run, name }, i) => ({ label: name, color: `c${i % 7}`,
      dash: DASHES[Math.floor(i / 7) % 4], points: found.curves[run][kind.value] })).filter((one) => one.points?.[0].length);
    const place = el("div", { class: "plot-here" });
    plot?.end();
    beside.hidden = false;
    shown.replaceChildren(...found.notes.map((note) => el("p", { class: "alarm" }, note)), place,
      el("h2", {}, "What differs in their recipes"), Object.keys(found.differences).length
        ? table(["Field", ...names], Object.entries(found.differences).map(([key, values]) => [key, ...values]), "Differences")
        : el("p", { class: "none" }, "No field."));
    plot = lines.length ? curves(place, lines, { across, log: true, spread: found.spread }) : null;
    plot?.set(uPlot.join(lines.map((one) => one.points)));
    plot?.last(Number(span.value));
    if (!plot) place.append(el("p", { class: "none" }, "No loss over this axis."));
    best = found.best;
    list();
  }
  const draw = () => compare().catch((error) => tell(error.message, true));

  async function sweep(name) {
    const found = await api.get("runs/sweep", { sweep: name });
    const part = ([kind, words, ...given]) => kind === "picture" ? picture(given[0], words) : kind === "table" ? table(...given, words)
      : kind === "list" ? el("ul", {}, words.map((one) => el("li", {}, one))) : kind === "alarm" ? el("p", { class: "alarm" }, words) : el(kind, {}, words);
    more.replaceChildren(el("section", {}, live && el("h2", {}, name), live && el("p", { class: "lead" }, found.lead), ...found.parts.map(part)));
    picked.clear();
    found.drawn.forEach((run) => picked.add(run));
    if (picked.size) await compare(); else list();
  }

  let drawing = 0;
  const end = api.events("runs/rows", (found) => {
    if (found.names) {
      const again = titles, first = found.sweeps.includes(api.place[0]) ? () => sweep(api.place[0]) : compare;
      titles = found.figures;
      for (const name of [...rows.keys()]) if (!found.names.includes(name)) { rows.delete(name); picked.delete(name); }
      for (const name of found.names) if (!rows.has(name)) rows.set(name, { name });
      keep(sweeps, live ? found.sweeps : [], String, (name) => button(`Sweep ${name}`, () => sweep(name)));
      if (!again && picked.size) first().catch((error) => tell(error.message, true));
    }
    if (found.name) rows.set(found.name, found);
    cancelAnimationFrame(drawing);
    drawing = requestAnimationFrame(list);
  });
  return () => { end(); plot?.end(); cancelAnimationFrame(drawing); };
}
