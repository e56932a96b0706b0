// Prove: a layout against one process, and a collective round by round.
import { button, copyable, el, field, fields, keep, lines, options, recipes, table, tell } from "./kit.js";
import { player } from "./player.js";

const NAMES = { loss: "Loss", gradients: "Gradients", grad_norm: "Gradient norm", weights: "Weights", gradient_scale: "Gradient scale",
  moments: "Optimizer", auxiliary: "Other figures", validation: "Validation", copies: "Copies" };
const IS = { runs: "Running.", ended: "It has ended without a result." };

export async function show(root, api) {
  const [{ families }, { modes, collectives }] = await Promise.all([api.get("train/recipes"), api.get("prove/choices")]);
  const [given, of = "quickstart", name, ...sets] = api.place, recipe = recipes(families, of);
  const layout = el("input", { name: "layout", value: given ?? "dp=2", size: 16, spellcheck: "false" }), mode = el("select", { name: "mode" }, options(modes));
  const steps = el("input", { name: "steps", type: "number", value: 3, min: 1, max: 20 }), result = el("div");
  const set = fields(sets.join("\n"), "model.layers=2\ndata.source=stdlib");
  root.append(el("h1", {}, "Prove"), el("section", {}, el("h2", {}, "A layout against one process"),
    el("p", { class: "lead" }, "Both train a few steps on the same batches. Losses, every gradient, every weight and the optimizer's states must be equal up to rounding."),
    el("div", { class: "row" }, field("Recipe", recipe), field("Layout", layout), field("Precision", mode), field("Steps", steps),
      button("Prove", async () => {
        const words = layout.value.trim(), sets = lines(set);
        const made = await api.post("prove/start", { recipe: recipe.value, layout: words, set: sets, mode: mode.value, steps: Number(steps.value) });
        tell(made.command);
        if (root.isConnected) api.go("prove", words, recipe.value, made.name, ...sets);
      }, { class: "main" }), button("Stop", () => api.post("prove/stop"))), field("Recipe fields, one per line", set), result), stepper(api, collectives));
  if (!name) return null;
  const state = el("p", { class: "lead", role: "status" }), text = el("pre", { tabindex: 0 }), proof = el("div");
  result.append(state, text, proof);
  return api.events(["prove/watch", { name }], (found) => {
    const { report, said } = found;
    const words = report ? `${report.layout} ${report.passed ? "computes" : "does NOT compute"} the same as one process.` : IS[found.is];
    if (state.textContent !== words) state.textContent = words;
    [text.textContent, text.hidden] = [said || "...", Boolean(report)];
    if (report) state.className = `verdict ${report.passed ? "good" : "bad"}`;
    keep(proof, report ? [report] : [], JSON.stringify, shown);
  });

  function shown(report) {
    const quoted = sets.map((text) => ` --set '${text.replaceAll("'", "'\\''")}'`).join("");
    return el("div", {}, table(["", "Difference", "Allowed", "", "Largest at"], Object.entries(NAMES).map(([key, title]) => [title,
      report[key].max_rel?.toExponential(1) ?? "not finite", report.tolerance[key].toExponential(1), report[key].passed ? "ok" : "WRONG", report[key].worst])),
    report.notes.map((note) => el("p", {}, `Note: ${note}`)),
    copyable(`fivefold verify ${of}${quoted}${given && ` --layout ${given}`} --steps ${report.steps} --mode ${report.mode}`, "The same in the terminal"));
  }
}

/** A collective of one's choice, with the program of the offline pages. */
function stepper(api, collectives) {
  const primitive = el("select", { onchange: () => { algorithms(); draw(); } }, options(Object.keys(collectives)));
  const algorithm = el("select", { onchange: () => draw() }), place = el("div");
  const number = (value, more) => el("input", { type: "number", value, onchange: () => draw(), ...more });
  const ranks = number(4, { min: 1, max: 32 }), local = number(0, { min: 0, max: 32 });
  const algorithms = () => algorithm.replaceChildren(...options(Object.keys(collectives[primitive.value])));
  let last = 0;
  async function draw() {
    const turn = ++last;
    try {
      const found = await api.get("prove/collective", { primitive: primitive.value, algorithm: algorithm.value, ranks: ranks.value, local: local.value });
      if (turn !== last) return; // something else was chosen meanwhile
      const { body } = new DOMParser().parseFromString(found.player, "text/html"), box = el("div", { class: "player" });
      box.append(...body.firstElementChild.childNodes);
      place.replaceChildren(box);
      const made = player(box);
      box.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (by && event.target !== made.range && !event.target.matches(".numbers")) made.step(by);
      });
    } catch (error) { place.replaceChildren(el("p", { class: "alarm", role: "alert" }, error.message)); }
  }
  primitive.value = "all_reduce";
  algorithms();
  algorithm.value = "ring";
  draw();
  return el("section", {}, el("h2", {}, "A collective, round by round"), el("div", { class: "row" }, field("Collective", primitive),
    field("Algorithm", algorithm), field("Ranks", ranks), field("Ranks of a node (0: all)", local)), place);
}
