// Runs: all of them with their figures, some side by side, and what can be made of one.
import { button, copyable, el, field, picture, table, tell } from "./kit.js";
import { curves, spans } from "./curves.js";
import { state } from "./train.js";

const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];

export async function show(root, api) {
  const rows = new Map(), picked = new Set(api.place);
  let titles = null, best = {}, order = "", down = false, leave = null;
  const filter = el("input", { type: "search", placeholder: "name, layout, architecture", oninput: () => list() });
  const place = el("div", { class: "words" }), beside = el("div"), more = el("div");
  const sweeps = el("div", { class: "row" }), live = !api.recorded;
  root.append(...(live ? [el("h1", {}, "Runs")] : []), el("div", { class: "row" }, field("Filter", filter),
    button("Compare", () => compare(), { class: "main" }), sweeps), place, more, beside);

  function list() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => `${row.name} ${row.layout} ${row.arch} ${row.kind}`.toLowerCase();
    const shown = [...rows.values()].filter((row) => words.every((word) => text(row).includes(word)));
    if (order) shown.sort((a, b) => ((a.figures?.[order] ?? Infinity) - (b.figures?.[order] ?? Infinity)) * (down ? -1 : 1));
    const keys = Object.keys(titles ?? {}).filter((key) => shown.some((row) => row.shown?.[key] != null));
    const head = (key) => el("button", { type: "button", class: "plain", onclick: () => { down = order === key && !down; order = key; list(); } },
      titles[key], order === key ? (down ? " ↓" : " ↑") : "");
    const box = (row) => el("label", {}, el("input", { type: "checkbox", checked: picked.has(row.name), onchange: (event) => {
      event.target.checked ? picked.add(row.name) : picked.delete(row.name);
    } }), " ", row.label ?? row.name);
    const kept = document.activeElement?.closest?.("td, th") && document.activeElement.textContent;
    const own = (row) => [button("More", () => about(row.name), { "aria-label": `More on ${row.name}` }),
      el("a", { href: `#train/${encodeURIComponent(row.name)}` }, row.kind ? state(row) : "...")];
    const figure = (row, key) => (picked.has(row.name) && best[key] != null && row.figures?.[key] === best[key]
      ? el("b", {}, row.shown[key]) : row.shown?.[key] ?? "");
    place.replaceChildren(shown.length ? table(["Run", ...(live ? ["More", "State"] : []), "Layout", ...keys.map(head)], shown.map((row) =>
      [box(row), ...(live ? own(row) : []), row.layout || row.problem || "", ...keys.map((key) => figure(row, key))]), "Runs")
      : el("p", { class: "none" }, rows.size ? "No run matches." : "There is no run here yet. Train one."));
    if (kept) [...place.querySelectorAll("button")].find((one) => one.textContent === kept)?.focus();
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
    leave?.();
    const names = [...picked], axis = beside.querySelector("select")?.value || "step", kind = beside.querySelectorAll("select")[1]?.value || "loss";
    const found = await api.get("runs/compare", { runs: JSON.stringify(names), axis });
    const labels = Object.fromEntries(found.runs.map((run) => [run.run, run.name]));
    const option = (value, now, words = value) => el("option", { value, selected: value === now }, words);
    const plot = el("div", { class: "plot-here" }), draw = () => compare().catch((error) => tell(error.message, true));
    const lines = Object.entries(found.curves).map(([name, curve], i) => ({ label: labels[name] || name, color: `c${i % 7}`,
      dash: DASHES[Math.floor(i / 7) % 4], points: curve[kind] })).filter((one) => one.points?.[0].length);
    const runs = found.runs.map((run) => run.name);
    beside.replaceChildren(el("section", {}, el("h2", {}, "Side by side"), ...found.notes.map((note) => el("p", { class: "alarm" }, note)),
      el("div", { class: "row" }, el("label", {}, "over ", el("select", { onchange: draw }, found.axes.map((one) => option(one, axis)))),
        el("select", { "aria-label": "Loss", onchange: draw }, Object.entries(found.kinds).map(([key, words]) => option(key, kind, words))),
        spans((share) => made?.last(share))),
      plot, el("h2", {}, "What differs in their recipes"), Object.keys(found.differences).length
        ? table(["Field", ...runs], Object.entries(found.differences).map(([key, values]) => [key, ...values.map((v) => (v == null ? "unset" : String(v)))]), "Differences")
        : el("p", { class: "none" }, "No field.")));
    const made = lines.length ? curves(plot, lines, { across: axis, log: true, spread: found.spread }) : null;
    if (made) made.set(uPlot.join(lines.map((one) => one.points)));
    else plot.append(el("p", { class: "none" }, "No loss over this axis."));
    leave = made && (() => made.end());
    best = found.best;
    list();
  }

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
    if (found.error) return tell(found.error, true);
    if (found.names) {
      const again = titles, first = found.sweeps.includes(api.place[0]) ? () => sweep(api.place[0]) : compare;
      titles = found.figures;
      found.names.forEach((name) => rows.set(name, { name }));
      sweeps.replaceChildren(...(live ? found.sweeps.map((name) => button(`Sweep ${name}`, () => sweep(name))) : []));
      if (!again && picked.size) first().catch((error) => tell(error.message, true));
    }
    for (const name of found.gone || []) { rows.delete(name); picked.delete(name); }
    if (found.name) rows.set(found.name, found);
    cancelAnimationFrame(drawing);
    drawing = requestAnimationFrame(list);
  });
  return () => { end(); leave?.(); cancelAnimationFrame(drawing); };
}
