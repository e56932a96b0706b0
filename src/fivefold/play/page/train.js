// Train and watch: a form that starts a run, the job list, and one run as it trains.
import { button, bytes, copyable, el, field, picture, short, table, tell, time } from "./kit.js";
import { curves, smoother, spans } from "./curves.js";

const KINDS = { training: "training", stopped: "stopped", complete: "complete", new: "not started yet" };
const BELOW = { tokens_per_s: "Tokens per second", mfu: "MFU", grad_norm: "Gradient norm", lr: "Learning rate",
  step_s: "Seconds of a step", peak_memory_bytes: "Peak memory" };
const SHOWN = { mfu: (v) => `${(100 * v).toPrecision(3)}%`, peak_memory_bytes: bytes };

/** What a run is doing, in words. */
export const state = ({ kind, step, steps }) => kind === "new" ? KINDS.new
  : `${KINDS[kind]}, step ${step.toLocaleString("en")}${steps ? ` of ${steps.toLocaleString("en")}` : ""}`;

export async function show(root, api) {
  const runs = el("div", { class: "choices" }), view = el("div");
  root.append(el("h1", { class: "sr" }, "Train"), runs, view);
  const given = api.place[0] === "new" ? JSON.parse(api.place[1] ?? "{}") : null; // a layout of the part Machine
  let known = null, chosen = given ? undefined : api.place[0], leave = null;
  const form = starter(api, (run) => api.go("train", run), given);
  const list = el("div", { class: "jobs" });
  const select = el("select", { "aria-label": "Run", onchange: () => api.go("train", select.value) });
  const details = el("details", { open: Boolean(given) }, el("summary", {}, "Start a run"), form);
  const empty = el("p", { class: "lead", hidden: true }, "Nothing has been trained here yet. Train a small model on this machine: ",
    "its loss shows in seconds, its first sentences in a minute or two.");
  runs.append(el("div", { class: "row" }, select), empty, details, list);

  function choose(name) {
    leave?.();
    leave = null;
    view.replaceChildren();
    if (name) leave = watch(view, api, name);
  }

  const end = api.events("train/jobs", (found) => {
    if (found.error) return tell(found.error, true);
    const names = found.runs.map((run) => run.name);
    chosen ??= (found.runs.find((run) => run.kind === "training") || found.runs[0])?.name;
    if (!known && !given) details.open = !names.length && !chosen;
    empty.hidden = Boolean(names.length || chosen);
    select.parentElement.hidden = !names.length;
    if (JSON.stringify(found.runs) !== JSON.stringify(known)) {
      select.replaceChildren(...found.runs.map((run) => el("option", { value: run.name, selected: run.name === chosen },
        `${run.name}: ${state(run)}`)));
    }
    if (chosen && names.includes(chosen) && !leave) choose(chosen);
    known = found.runs;
    list.replaceChildren(
      ...found.started.map((job) => el("div", { class: "job" }, el("b", {}, job.run), job.starts ? " starts" : " did not start",
        el("pre", { tabindex: 0 }, job.said || "..."))),
      ...found.waiting.map((job) => el("div", { class: "job" }, el("b", {}, job.run), " waits ", el("code", {}, job.command), " ",
        button("Remove", () => api.post("train/remove", { id: job.id })))));
  });
  return () => { end(); leave?.(); };
}

/** The form. started: is called with the name of the new run. given: {recipe, layout, sets} to begin with, or null. */
function starter(api, started, given) {
  const recipe = el("select", {}), about = el("small", {});
  const layout = el("input", { placeholder: "as in the recipe", size: 24, spellcheck: "false" });
  const set = el("textarea", { rows: 3, cols: 40, placeholder: "train.steps=300\ndata.source=my_texts/", spellcheck: "false" });
  const timed = el("input", { type: "checkbox", checked: true });
  let words = {};
  recipe.addEventListener("change", () => { about.textContent = words[recipe.value] || ""; });
  api.get("train/recipes").then(({ recipes, families }) => {
    words = recipes;
    recipe.append(...Object.entries(families).map(([family, names]) => el("optgroup", { label: family },
      names.map((name) => el("option", { value: name, selected: name === "quickstart" }, name)))));
    if (given) [recipe.value, layout.value, set.value] = [given.recipe, given.layout, given.sets];
    about.textContent = words[recipe.value] ?? "";
  }).catch((error) => tell(error.message, true));
  const start = button("Train", async () => {
    const fields = set.value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (timed.checked && !fields.some((line) => line.startsWith("observe.trace_step"))) fields.push("observe.trace_step=20");
    const made = await api.post("train/start", { recipe: recipe.value, layout: layout.value.trim(), set: fields });
    tell(`${made.command}`);
    started(made.run);
  }, { class: "main" });
  return el("div", { class: "starter" }, el("div", { class: "row" }, field("Recipe", recipe), field("Layout", layout), start), about,
    field("Recipe fields, one per line", set),
    el("label", {}, timed, " measure the timeline of step 20"));
}

/** One run, as it trains. Returns a function that ends it. */
function watch(root, api, name) {
  const steps = [], columns = {}, validation = { step: [], val_loss: [] }, samples = [], alarms = [];
  let about = {}, condition = {}, planned = {}, ranks = [], restarts = [], said = "", weight = 0.9, below = "tokens_per_s", plots = null;
  const words = el("p", { class: "lead", role: "status" }), buttons = el("div", { class: "row" });
  const figures = el("dl", { class: "figures" }), wrong = el("div"), loss = el("div", { class: "plot-here" });
  const other = el("div", { class: "plot-here" }), texts = el("div"), table_ = el("div", { class: "words" }), time_ = el("div"), own = el("div");
  const slider = el("input", { type: "range", min: 0, max: 100, value: 30, oninput: () => { weight = weigh(); draw(); } });
  const weigh = () => (slider.value > 0 ? 1 - 10 ** (-slider.value / 40) : 0);
  weight = weigh();
  const log = el("input", { type: "checkbox", onchange: () => plots[0].log(log.checked) });
  const which = el("select", { "aria-label": "Second curve", onchange: () => { below = which.value; second(); draw(true); } },
    Object.entries(BELOW).map(([value, title]) => el("option", { value }, title)));
  const section = (title, ...content) => el("section", {}, el("h2", {}, title), ...content);
  root.append(el("h2", { class: "sr" }, name), el("div", { class: "head row" }, words, buttons), wrong, figures,
    section("Loss", el("div", { class: "row" }, el("label", {}, "Smoothing ", slider), el("label", {}, log, " log scale"),
      spans((share) => plots.forEach((plot) => plot.last(share)))), loss, el("div", { class: "row" }, which), other),
    section("Samples", texts), section("Ranks", table_), section("A step's timeline", time_), own);

  const line = (label, color, more) => ({ label, color, ...more });
  function second() {
    plots?.[1]?.end();
    const plot = curves(other, [line(BELOW[below], "faint", { width: 1 }), line("smoothed", "first")],
      { across: "Step", height: 200, show: SHOWN[below], zero: below !== "lr" && below !== "grad_norm", sync: name });
    plots = [plots?.[0], plot];
  }
  plots = [curves(loss, [line("loss", "faint", { width: 1 }), line("smoothed", "first"), line("validation", "second", { dots: true })],
    { across: "Step", sync: name })];
  second();

  const val = [], mean = smoother(), other_mean = smoother();
  function place(step) {  // of a step, which are in order
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return steps[low] === step ? low : -1;
  }

  let drawn = 0;
  function draw(again) {
    if (again) [val.length, drawn] = [0, 0];
    while (val.length < steps.length) val.push(null);
    for (; drawn < validation.step.length && validation.step[drawn] <= steps.at(-1); drawn++) {
      const at = place(validation.step[drawn]);
      if (at >= 0) val[at] = validation.val_loss[drawn];
    }
    plots[0].set([steps, columns.loss || [], mean(columns.loss || [], weight, again), val]);
    setTimeout(() => plots[1].set([steps, columns[below] || [], other_mean(columns[below] || [], weight, again)]));
  }

  const last = (values, count = 20) => {
    const known = (values || []).slice(-count).filter((v) => v != null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  const card = (title, value, note, main) => el("div", { class: main && "main" }, el("dt", {}, title), el("dd", {}, value, note && el("small", {}, note)));

  function head() {
    words.textContent = state(condition);
    const left = condition.steps ? condition.steps - condition.step : null, each = last(columns.step_s);
    const plan = (key, text) => (planned[key] == null ? "" : `planned: ${text(planned[key])}`);
    const share = (v) => (v == null ? "–" : `${(100 * v).toPrecision(3)}%`);
    const val = validation.val_loss[validation.val_loss.length - 1];
    figures.replaceChildren(
      card("Train loss", last(columns.loss)?.toFixed(3) ?? "–", "mean of 20 steps", true),
      card("Validation loss", val?.toFixed(3) ?? "–", validation.step.length ? `step ${validation.step.at(-1).toLocaleString("en")}` : ""),
      card("Tokens per second", short(last(columns.tokens_per_s)), plan("tokens_per_s", short)),
      card("MFU", share(last(columns.mfu)), plan("mfu", share)),
      card("Step", time(each), plan("step_s", time)),
      card("Left", condition.kind === "training" && left ? time(left * each) : "–", left ? `${left.toLocaleString("en")} steps` : ""),
      card("Peak memory", bytes(columns.peak_memory_bytes?.at(-1)), plan("memory", (v) => `${bytes(v)} of tensors`)));
    wrong.replaceChildren(...alarms.slice(-5).map(([step, text]) => el("p", { class: "alarm", role: "alert" }, `Step ${step.toLocaleString("en")}: ${text}`)),
      ...restarts.map((text) => el("p", { class: "alarm" }, `Restarted ${text}`)),
      condition.kind !== "training" && condition.kind !== "complete" && /error|failed/i.test(said) ? el("pre", { class: "alarm", tabindex: 0 }, said) : "");
    table_.replaceChildren(ranks.length ? table(["Rank", "Step", "Activity", "Memory"], ranks.map((rank) =>
      [String(rank.rank), rank.step == null ? "–" : rank.step.toLocaleString("en"), rank.does, bytes(rank.memory)]), "Ranks")
      : el("p", { class: "none" }, condition.kind === "training" ? "Its ranks are on another machine." : "No rank trains now."));
  }

  function act() {
    const going = condition.kind === "training";
    const order = (path, more) => () => api.post(`train/${path}`, { run: name, ...more });
    const layout = el("input", { "aria-label": "Another layout", placeholder: about.layout || "dp=2", size: 16, spellcheck: "false" });
    buttons.replaceChildren(...[
      going && button("Pause", async () => {
        await api.post("train/stop", { run: name });
        tell("It finishes its step, saves and ends");
      }, { title: "Finishes the step, saves and ends. Pressed again, it ends at once" }),
      !going && condition.kind !== "complete" && button("Resume", order("resume"), { class: "main" }),
      condition.kind !== "complete" && layout,
      condition.kind !== "complete" && button("Resume in this layout", async () => {
        if (!layout.value.trim()) throw Error("Write a layout, such as tp=2 or dp=2,zero=1");
        const made = await api.post("train/resume", { run: name, layout: layout.value.trim() });
        tell(made.command);
      }, { title: "Saves, then resumes with the same weights and data in another layout" }),
      button("Train again", async () => api.go("train", (await api.post("train/start", { recipe: name })).run)),
    ].filter(Boolean));
  }

  async function timeline() {
    if (about.timeline) {
      const found = await api.get("train/timeline", { run: name });
      return time_.replaceChildren(picture(found.picture, "Timeline of a step"));
    }
    tell("The run saves, and resumes with the timeline of a step to come");
    await api.post("train/resume", { run: name, set: [`observe.trace_step=${condition.step + 10}`] });
  }

  async function load() {
    about = await api.get("train/about", { run: name });
    const able = about.timeline || condition.kind !== "complete";
    time_.replaceChildren(able ? button(about.timeline ? "Show, measured and planned" : "Measure one", timeline)
      : el("p", { class: "none" }, "No step of this run was measured."));
    own.replaceChildren(section("The same in the terminal", copyable(about.command, "Repeat the run"), copyable(about.resume, "Resume it"),
      el("details", {}, el("summary", {}, "Recipe"), copyable(about.recipe, "recipe.toml"))));
    act();
  }

  function take(found) {
    if (found.again) {
      steps.length = samples.length = alarms.length = 0;
      for (const values of [...Object.values(columns), ...Object.values(validation)]) values.length = 0;
    }
    for (const [from, into] of [[found.columns, columns], [found.validation, validation]])
      for (const [key, values] of Object.entries(from)) {
        const all = key === "step" && into === columns ? steps : (into[key] ??= []);
        for (const value of values) all.push(value);
      }
    samples.push(...found.samples);
    alarms.push(...found.alarms);
    if (found.samples.length || found.again) {
      const shown = ([step, text]) => el("figure", { class: "sample" }, el("figcaption", {}, `Step ${step.toLocaleString("en")}`), el("pre", { tabindex: 0 }, text));
      const late = samples.slice(-20).reverse();
      texts.replaceChildren(...late.slice(0, 1).map(shown), late.length > 1
        ? el("details", {}, el("summary", {}, "Earlier samples"), late.slice(1).map(shown)) : late.length ? "" : el("p", { class: "none" }, "None yet."));
    }
    draw(found.again);
  }

  let before = "";
  const end = api.events(["train/watch", { run: name }], (found) => {
    if (found.error) return tell(found.error, true);
    ({ condition = condition, planned = planned, ranks = ranks, restarts = restarts, said = said } = found);
    if (found.columns) take(found);
    head();
    if (condition.kind !== before || found.again) {  // a run that resumes may have another layout
      before = condition.kind; load().catch((error) => tell(error.message, true)); }
  });
  return () => { end(); plots.forEach((plot) => plot.end()); };
}
